"""Signatures as text, and their comparison with a table."""

import dataclasses
import enum
import subprocess
import sys

import pytest

from ntp_plugin.tested_versions import comparison
from ntp_plugin.tested_versions.comparison import TestedPackage, compare
from ntp_plugin.tested_versions.signatures import MISSING, signature_of, text_of

ALTERED = """
import sys
import torch.distributed.distributed_c10d as c10d
from ntp_plugin.errors import NtpError
from ntp_plugin.tested_versions.comparison import require_tested

original = c10d._update_default_pg
if "altered" in sys.argv:
    c10d._update_default_pg = lambda group, why: original(group)
if "removed" in sys.argv:
    del c10d._get_default_store
if "unknown" in sys.argv:
    sys.modules["torch"].__version__ = "9.1.0"
try:
    require_tested("torch", reports=True)
except NtpError as error:
    sys.exit(f"{error.exit_code} {error}")
"""


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.5


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (
            lambda a, b=1, *c, d="x", e=None, **f: (a, b, c, d, e, f),
            "(a, b=1, *c, d (keyword)='x', e (keyword)=None, **f)",
        ),
        (lambda a=[]: a, "(a=...)"),
        (Point, "(x, y=0.5)"),
        (Color, "class"),
        (Color.RED, "value"),
        (property(repr), "property"),
        (7, "value"),
    ],
)
def test_a_signature_is_names_kinds_and_plain_defaults(found, text):
    assert text_of(found) == text


def test_annotations_do_not_count():
    def annotated(a: int, b: "str" = "x") -> None: ...

    assert text_of(annotated) == text_of(lambda a, b="x": (a, b))


def test_what_is_not_there_is_missing():
    assert signature_of("textwrap:no_such_function") == MISSING
    assert signature_of("no_such_module:anything") == MISSING
    assert signature_of("textwrap:dedent.no_such_attribute") == MISSING


def test_each_change_is_named_with_both_signatures():
    import torch  # noqa: F401, PLC0415  (what is not imported is not compared)

    table = TestedPackage(
        package="torch",
        version="2.15.0",
        signatures={"textwrap:dedent": "(text)", "textwrap:indent": "(text, prefix)", "textwrap:lost": "()"},
    )
    found = compare(table)
    assert found.compared == 3
    assert found.changes == (
        "textwrap:indent is (text, prefix, predicate=None), tested as (text, prefix)",
        "textwrap:lost is missing",
    )


def test_a_wrapper_that_passes_all_on_and_a_patched_function_are_accepted(monkeypatch):
    import textwrap  # noqa: PLC0415

    import torch  # noqa: F401, PLC0415  (as above)

    monkeypatch.setattr(textwrap, "dedent", lambda *args, **kwargs: (args, kwargs))
    monkeypatch.setattr(textwrap, "indent", lambda text, more=False: (text, more))
    signatures = {"textwrap:dedent": "(text)", "textwrap:indent": "(text)"}
    table = TestedPackage(package="torch", version="2.15.0", signatures=signatures)
    assert [change.split()[0] for change in compare(table).changes] == ["textwrap:indent"]
    patched = dataclasses.replace(table, patched={"textwrap:indent": "(text, more=False)"})
    assert compare(patched).changes == ()


@pytest.mark.parametrize(("version", "known"), [("2.15.3", True), ("2.16.0", False), ("3.15.0", False)])
def test_another_patch_release_is_known(version, known):
    one = comparison.InstalledPackage(package="torch", version=version, tested="2.15.0", compared=1, changes=())
    assert one.is_tested is known


def played(*words):
    done = subprocess.run([sys.executable, "-c", ALTERED, *words], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_the_installed_torch_is_accepted_silently():
    """The negative control of the next two."""
    assert played() == (0, "")


def test_every_function_that_changed_is_named_in_one_message():
    code, error = played("altered", "removed", "unknown")
    assert code == 1
    assert error.startswith("2 functions that ntp_plugin replaces or calls are not those it was tested with")
    assert "torch 9.1.0 (tested: 2.15.0): " in error
    assert "torch.distributed.distributed_c10d:_update_default_pg is (group, why), tested as (pg)" in error
    assert "torch.distributed.distributed_c10d:_get_default_store is missing" in error
    assert "Fix: pip install 'torch==2.15.0'" in error


def test_an_unknown_version_with_the_same_signatures_is_one_line():
    code, error = played("unknown")
    assert code == 0
    assert error.count("\n") == 1
    assert "ntp_plugin was not tested with torch 9.1.0 (tested: 2.15.0); all 14 signatures" in error
