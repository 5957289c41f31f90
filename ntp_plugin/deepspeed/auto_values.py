"""What a trainer writes in place of "auto" in a DeepSpeed configuration, as far as a check has to know it.

The HF Trainer and Accelerate fill such values in before DeepSpeed reads the configuration: from `TrainingArguments`, or
from the script's loader and optimizer. Nobody knows these before the job runs, so the trainer's own defaults stand in,
and a note says which. DeepSpeed leaves an "auto" out that is in one of its blocks; so does this.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ntp_plugin.errors import ConfigError

AUTO = "auto"
TRAINERS = ("hf", "accelerate", "loop")
"""Who fills such values in: the HF Trainer, a script with Accelerate; nobody in a loop of the script's own."""
_MICRO, _ACCUMULATION, _TOTAL = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
)
_MICRO_BATCH = {"hf": 8, "accelerate": 1}
"""`TrainingArguments.per_device_train_batch_size`; Accelerate asks the script's loader."""
_CLIPPING = {"gradient_clipping": 1.0}
_BLOCKS = (
    "zero_optimization",
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "params",
    "offload_optimizer",
    "offload_param",
)
_PRECISION = ("fp16", "bf16")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Filled:
    """A configuration without "auto", and what a user should know about the values that stand in."""

    config: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def fill(raw: Mapping[str, Any], *, trainer: str | None, size: int | None) -> Filled:
    """Fill in what a trainer would.

    Args:
        raw: The configuration as it is in the file.
        trainer: One of `TRAINERS`; None: the HF Trainer, if any value is "auto".
        size: The number of processes, if known; without it `train_batch_size` follows from the others.

    Raises:
        ConfigError: A loop of the script's own has nobody who would fill in an "auto".
    """
    found = tuple(_named(raw))
    if not found:
        return Filled(config=raw)
    if trainer == "loop":
        raise ConfigError(
            f"{found[0]} is {AUTO!r}, which DeepSpeed alone cannot read",
            fix="write the value, or name who fills it in: --trainer hf or --trainer accelerate",
        )
    trainer = trainer or TRAINERS[0]
    config = _without(raw)
    sizes = _batch(raw, _MICRO_BATCH[trainer], size)
    config |= sizes | {name: value for name, value in _CLIPPING.items() if raw.get(name) == AUTO}
    return Filled(config=config, notes=tuple(_notes(trainer, found, sizes)))


def _named(block: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the names of all values that a trainer fills in."""
    found = []
    for name, value in block.items():
        if value == AUTO and (not prefix or prefix.split(".")[-2] in _BLOCKS):
            found.append(prefix + name)
        elif isinstance(value, Mapping):
            found += _named(value, f"{prefix}{name}.")
    return found


def _without(block: Mapping[str, Any], *, of: str = "") -> dict[str, Any]:
    """Return the block without them; in other blocks "auto" is a value of DeepSpeed's own."""
    return {
        name: _without(value, of=name) if isinstance(value, Mapping) else value
        for name, value in block.items()
        if not (value == AUTO and (not of or of in _BLOCKS))
    }


def _batch(raw: Mapping[str, Any], usual: int, size: int | None) -> dict[str, Any]:
    """Return the three sizes of batches, where one of them is "auto"."""
    known = {name: raw[name] for name in (_MICRO, _ACCUMULATION, _TOTAL) if raw.get(name, AUTO) != AUTO}
    if AUTO not in (raw.get(name) for name in (_MICRO, _ACCUMULATION, _TOTAL)):
        return {}
    each = known.get(_ACCUMULATION, 1)
    if _MICRO not in known and _TOTAL in known and size:
        return {_MICRO: known[_TOTAL] // (size * each), _ACCUMULATION: each}
    return {_MICRO: known.get(_MICRO, usual), _ACCUMULATION: each}


def _notes(trainer: str, found: tuple[str, ...], sizes: Mapping[str, Any]) -> list[str]:
    who = {"hf": "the HF Trainer", "accelerate": "Accelerate"}[trainer]
    what = [f"{name} = {value}" for name, value in sizes.items() if name in found]
    notes = [
        f"{len(found)} values are {AUTO!r}: {who} fills them in" + (f"; assumed: {', '.join(what)}" if what else "")
    ]
    if any(f"{kind}.enabled" in found for kind in _PRECISION):
        notes.append("fp16 and bf16 are taken as off; the job checks the precision that the trainer chooses")
    return notes
