"""What a GPU and its links can do, from a data file in which every constant stands beside its source."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ntp_plugin.config.files import read_file
from ntp_plugin.errors import ConfigError

FOLDER = Path(__file__).parent / "machines"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GpuModel:
    """One kind of GPU in its scale-up domain; speeds are one way."""

    domain_gpus: int
    tflops: float
    matmul_efficiency: float
    memory_gb: float
    memory_gb_per_s: float
    domain_gb_per_s: float
    domain_us: float
    nic_gb_per_s: float
    nic_us: float
    overlap: float
    boost: float
    boost_exponent: float

    @property
    def boosted_speed(self) -> float:
        """How much faster a GPU computes at the most power that it may take."""
        return float(self.boost**self.boost_exponent)


def known() -> tuple[str, ...]:
    """The machines that come with us."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def read_machine(name: str) -> GpuModel:
    """The machine of that name, or of a file that is named."""
    path = Path(name) if name.endswith((".toml", ".json")) else FOLDER / f"{name}.toml"
    if path.parent == FOLDER and not path.exists():
        raise ConfigError(
            f"machine = {name!r} is not known", fix=f"choose from {', '.join(known())}, or name a .toml file"
        )
    return parse(
        read_file(path, least="simulator/machines/ has examples"),
        where=str(path) if path.parent != FOLDER else path.name,
    )


def parse(table: Mapping[str, Any], *, where: str) -> GpuModel:
    """Every constant a number with a source."""
    fields = {field.name: field.type for field in dataclasses.fields(GpuModel)}
    for name in [*fields, *table]:
        entry = table.get(name)
        if name not in fields:
            raise ConfigError(f"{where}: {name} is not a constant of a machine", fix=f"known: {', '.join(fields)}")
        if not isinstance(entry, Mapping) or not str(entry.get("source", "")).strip():
            raise ConfigError(f"{where}: {name} has no source", fix=f"write [{name}] with value = ... and source = ...")
        value = entry.get("value")
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"{where}: {name} = {value!r} must be a number above 0")
    values = {name: float(table[name]["value"]) for name in fields}
    return GpuModel(domain_gpus=int(values.pop("domain_gpus")), **values)
