"""Compares what is installed with the tables of tested signatures; refuses a job, or warns.

It runs before the first hook of a job is installed, so that what it compares is the framework's own. It also comes
before the modules of an adapter that import a framework's names, since a missing one would end them with an
`ImportError`.
"""

import dataclasses
import functools
import json
import logging
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from ntp_plugin.errors import Refused
from ntp_plugin.tested_versions.signatures import ANYTHING, MISSING, signature_of

_LOG = logging.getLogger(__name__)
FOLDER = Path(__file__).parent
_MODULES = {
    "megatron-core": "megatron.core",
    "transformer-engine": "transformer_engine",
    "deepspeed": "deepspeed",
    "torch": "torch",
    "transformers": "transformers",
    "accelerate": "accelerate",
}
"""Package -> the module that knows its version."""
TABLES = {
    "megatron": ("megatron-core", "transformer-engine", "torch"),
    "deepspeed": ("deepspeed", "torch"),
    "trainer": ("transformers", "accelerate"),
    "accelerate": ("accelerate",),
    "torch": ("torch",),
}
"""Framework -> the packages that its adapter replaces or calls functions of."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TestedPackage:
    """A table: the version that the tests ran with, and its signatures by target."""

    __test__ = False
    package: str
    version: str
    signatures: Mapping[str, str]
    patched: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Signatures that differ in a framework with the patches of this repository (`patches/`), which are tested too."""

    @classmethod
    def read(cls, package: str) -> "TestedPackage":
        """Read the table of a package."""
        return cls(package=package, **json.loads(table_of(package).read_text()))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InstalledPackage:
    """A package as it is installed, compared with its table.

    Attributes:
        tested: The version that the tests ran with.
        compared: How many signatures were compared.
        changes: For each that differs, the target with what was found and what was tested.
    """

    package: str
    version: str
    tested: str
    compared: int
    changes: tuple[str, ...]

    @property
    def is_tested(self) -> bool:
        """Whether the tests ran with this version, or with another patch release of it."""
        return self.version.split(".")[:2] == self.tested.split(".")[:2]

    @property
    def changed(self) -> str:
        """What has changed, in one line."""
        return f"{self.package} {self.version} (tested: {self.tested}): {'; '.join(self.changes)}"


def table_of(package: str) -> Path:
    """Return the file of a package's table."""
    name = {"megatron-core": "megatron"}.get(package, package.replace("-", "_"))
    return FOLDER / f"{name}.json"


@functools.cache
def installed(framework: str) -> tuple[InstalledPackage, ...]:
    """Compare the packages that an adapter needs; a package that is not imported is left out.

    Args:
        framework: "megatron", "deepspeed", "trainer" (Hugging Face's), or "torch" for a loop without any.
    """
    packages = [package for package in TABLES[framework] if _MODULES[package] in sys.modules]
    return tuple(compare(TestedPackage.read(package)) for package in packages)


def compare(table: TestedPackage) -> InstalledPackage:
    """Compare an imported package with its table."""
    pairs = ((target, signature_of(target), tested) for target, tested in table.signatures.items())
    return InstalledPackage(
        package=table.package,
        version=_version_of(table.package),
        tested=table.version,
        compared=len(table.signatures),
        changes=tuple(
            _change(target, found, tested)
            for target, found, tested in pairs
            if found not in (tested, table.patched.get(target), ANYTHING)
        ),
    )


def _version_of(package: str) -> str:
    """Return a package's version, without the part that says how it was built."""
    return str(getattr(sys.modules[_MODULES[package]], "__version__", "of an unknown version")).partition("+")[0]


def _change(target: str, found: str, tested: str) -> str:
    return f"{target} is missing" if found == MISSING else f"{target} is {found}, tested as {tested}"


def refusal(framework: str) -> Refused | None:
    """Return why a job with these packages is refused, naming every function that has changed; None if none has."""
    changed = [one for one in installed(framework) if one.changes]
    if not changed:
        return None
    pins = " ".join(f"'{one.package}=={one.tested}'" for one in changed)
    return Refused(
        "functions that ntp_plugin replaces or calls are not those it was tested with, so it might train wrongly. "
        + ". ".join(one.changed for one in changed),
        fix=f"pip install {pins}, or a newer ntp_plugin; with the plugin off the job runs without it",
    )


def warning(framework: str) -> str:
    """Return the warning for versions that the tests do not know, whose signatures agree; empty if there are none."""
    unknown = [one for one in installed(framework) if not (one.is_tested or one.changes)]
    if not unknown:
        return ""
    found = ", ".join(f"{one.package} {one.version} (tested: {one.tested})" for one in unknown)
    count = sum(one.compared for one in unknown)
    return f"ntp_plugin was not tested with {found}; all {count} signatures that it rests on agree, so the job goes on"


def require_present(targets: Iterable[str]) -> None:
    """Refuse a framework without functions that are replaced before it is known whether the plugin is enabled.

    Raises:
        Refused: A function is missing.
    """
    missing = [target for target in targets if signature_of(target) == MISSING]
    if missing:
        found = ", ".join(
            f"{package} {_version_of(package)}" for package in _MODULES if _MODULES[package] in sys.modules
        )
        raise Refused(
            f"{', '.join(missing)} missing, which ntp_plugin replaces ({found})",
            fix="install a version that the plugin was tested with (README), or start the job without ntp",
        )


def require_tested(framework: str, *, reports: bool) -> None:
    """Refuse a job whose framework has changed, and warn of a version that the tests do not know.

    Args:
        framework: As in `installed`.
        reports: Whether this rank logs the warning.

    Raises:
        Refused: A function has another signature than the tested one, or is missing.
    """
    error = refusal(framework)
    if error is not None:
        raise error
    if reports and (message := warning(framework)):
        _LOG.warning("%s", message)
