"""What a DeepSpeed rank's training depends on, compared with all other ranks (`recovery/same_settings.py`)."""

import dataclasses
import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import deepspeed
import numpy as np
import torch

from ntp_plugin.config.sections import TrainingPolicy
from ntp_plugin.deepspeed.sharded_weights import shape_of
from ntp_plugin.planning.topology import Slot
from ntp_plugin.recovery import fingerprint as fp
from ntp_plugin.recovery import same_settings
from ntp_plugin.recovery.fingerprint import Fingerprint

_FREE = (
    "tensorboard.",
    "wandb.",
    "csv_monitor.",
    "comet.",
    "flops_profiler.",
    "ntp.",
    "steps_per_print",
    "wall_clock_",
)
"""Prefixes of keys that say where a log goes; the plugin's own block is compared as its policy."""
_FREE_POLICY = ("events",)
_SAMPLES = 4
"""Number of samples of a data set that are compared."""


def settings(configuration: Mapping[str, Any], policy: TrainingPolicy) -> Fingerprint:
    """Return the fingerprint of what is known when an engine is built."""
    words = fp.in_words(configuration)
    kept = {f"configuration {name}": value for name, value in words.items() if not name.startswith(_FREE)}
    return same_settings.settings(
        {**same_settings.arguments_of_script(), **kept},
        fp.in_words(dataclasses.asdict(policy), free=_FREE_POLICY),
        framework={"deepspeed": deepspeed.__version__},
    )


def model(engine: Any, slot: Slot) -> Mapping[str, fp.Section]:
    """Return the fingerprint of the model of this slot of a replica."""
    tensors = {name: (str(one.dtype), tuple(shape_of(one))) for name, one in engine.module.named_parameters()}
    return {f"model of t{slot.tp}": fp.shapes(tensors)}


def data(sampler: Any) -> Fingerprint:
    """Return the fingerprint of the training loader's data set and order; empty if there is no loader yet."""
    if sampler is None:
        return Fingerprint(sections={})
    dataset = sampler.dataset
    words = {
        "type": f"{type(dataset).__module__}.{type(dataset).__qualname__}",
        "length": str(len(dataset)),
        "samples": _samples_of(dataset),
        **{name: str(getattr(sampler, name, None)) for name in ("seed", "shuffle", "num_replicas", "drop_last")},
    }
    known = getattr(dataset, "_fingerprint", None)  # Hugging Face's
    return Fingerprint(
        sections={same_settings.DATA: words | ({"fingerprint": known} if isinstance(known, str) else {})}
    )


def _samples_of(dataset: Any) -> str:
    """Return a digest of some samples, or why there is none: reading a sample twice may give two results."""
    last = len(dataset) - 1
    numbers = sorted({number * last // (_SAMPLES - 1) for number in range(_SAMPLES)}) if last >= 0 else []
    python, numeric = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            once, twice = ([_digest(dataset[number]) for number in numbers] for _ in range(2))
    except Exception as error:
        return f"not read: {type(error).__name__}"
    finally:
        random.setstate(python)
        np.random.set_state(numeric)
    return " ".join(once) if once == twice else "drawn anew each time"


def _digest(sample: Any) -> str:
    seen = hashlib.blake2b(digest_size=8)
    for part in _parts(sample):
        seen.update(part)
    return seen.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield str((value.dtype, tuple(value.shape))).encode()
        yield value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield str((value.dtype, value.shape)).encode()
        yield value.tobytes()
    elif isinstance(value, Mapping):
        for name in value:
            yield str(name).encode()
            yield from _parts(value[name])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _parts(part)
    else:
        yield (repr(value) if isinstance(value, int | float | str | bytes | None) else type(value).__name__).encode()
