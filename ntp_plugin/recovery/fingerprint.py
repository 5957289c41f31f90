"""What the result of a training depends on, as names and values that two processes can compare. PURE.

A process that joins with another seed, data set or plugin version trains on without an error, and the losses are wrong
from then on. So each process writes down what its training depends on, section by section: arguments, policy, versions,
environment, model, data. A section that a process does not have is not compared: a middle pipeline stage has no data.

This module decides; `same_settings.py` exchanges the sections. No torch, no store, no clock.
"""

import dataclasses
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

_SHOWN = 6
"""Differences in one error message; the others are counted."""
_WIDEST = 60
"""Characters of a value in an error message."""
_ABSENT = "not set"

RELEVANT_VARIABLES = (
    "CUBLAS_",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDNN_",
    "DS_",
    "MEGATRON_",
    "MKL_",
    "NCCL_ALGO",
    "NCCL_NVLS_ENABLE",
    "NCCL_PROTO",
    "NTP_CPU",
    "NVIDIA_TF32_OVERRIDE",
    "NVTE_",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "TORCH_ALLOW_TF32",
    "TORCHDYNAMO_DISABLE",
    "TORCHINDUCTOR_",
)
"""Prefixes of environment variables that choose how numbers are computed. Other variables name hosts, devices, folders
and addresses, which differ from process to process."""
_FREE_VARIABLES = ("MEGATRON_LOGGING_LEVEL", "TORCHINDUCTOR_CACHE_DIR", "DS_BUILD_", "DS_IGNORE_CUDA_DETECTION")
"""Prefixes of variables that choose nothing of that, although one of the prefixes above fits them."""

type Section = Mapping[str, str]
"""Name -> value as text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What the training of one process depends on: section -> its names and values."""

    sections: Mapping[str, Section]

    @functools.cached_property
    def digests(self) -> Mapping[str, str]:
        """Section -> a digest that is equal where all its names and values are."""
        return {section: _digest(words) for section, words in self.sections.items()}

    @property
    def digest(self) -> str:
        """One digest of all sections."""
        return _digest(self.digests)


def encode(section: Section) -> str:
    """A section as JSON."""
    return json.dumps(section, sort_keys=True)


def decode(text: str) -> Section:
    """A section from JSON; raises ValueError if it is not one."""
    words = json.loads(text)
    if not isinstance(words, dict) or not all(isinstance(value, str) for value in words.values()):
        raise ValueError("a section has names and values that are text")
    return words


def in_words(settings: Mapping[str, Any], *, free: Collection[str] = ()) -> Section:
    """Settings as a section: nested ones under dotted names, without the `free` ones, which may differ."""
    return {name: words for name, words in sorted(_flattened(settings)) if name not in free}


def environment(variables: Mapping[str, str]) -> Section:
    """The environment variables that choose how numbers are computed."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if name.startswith(RELEVANT_VARIABLES) and not name.startswith(_FREE_VARIABLES)
    }


def shapes(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> Section:
    """A model as a section, from name -> (dtype, shape) of its tensors."""
    return {name: f"{dtype} {list(shape)}" for name, (dtype, shape) in sorted(tensors.items())}


def differences(section: str, here: Section, there: Section) -> list[str]:
    """Every name whose value differs, with both values."""
    return [
        f"{name} ({section}) is {_shown(here.get(name, _ABSENT))} here and {_shown(there.get(name, _ABSENT))} there"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]


def in_short(found: Sequence[str]) -> str:
    """Differences in one line, the first of them in full."""
    more = len(found) - _SHOWN
    return "; ".join(found[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    """A section in which ranks differ: the ranks without the most frequent digest, and one rank that has it."""

    section: str
    ranks: tuple[int, ...]
    usual: int

    @property
    def asked(self) -> tuple[int, int]:
        """The two ranks whose sections show what differs."""
        return self.usual, self.ranks[0]


def deviations(digests: Sequence[Mapping[str, str]]) -> list[Deviation]:
    """Find the sections in which ranks differ, from the digests of each rank.

    Of two groups of the same size the one with the lowest rank is taken for usual, so that all ranks find the same.
    """
    found = []
    for section in sorted({section for theirs in digests for section in theirs}):
        by_rank = {rank: theirs[section] for rank, theirs in enumerate(digests) if section in theirs}
        usual = Counter(by_rank.values()).most_common(1)[0][0]  # of equal counts the first
        others = tuple(rank for rank, digest in by_rank.items() if digest != usual)
        if others:
            first = next(rank for rank, digest in by_rank.items() if digest == usual)
            found.append(Deviation(section=section, ranks=others, usual=first))
    return found


def _digest(words: Mapping[str, str]) -> str:
    return hashlib.blake2b(encode(words).encode(), digest_size=16).hexdigest()


def _flattened(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", words) for inner, words in _flattened(value))
        else:
            yield str(name), _words(value)


def _words(value: Any) -> str:
    """The text of a value. An object without one is named by its type, since addresses differ between processes."""
    words = repr(value)
    return words if " at 0x" not in words else f"{type(value).__module__}.{type(value).__qualname__}"


def _shown(value: str) -> str:
    return value if len(value) <= _WIDEST else value[: _WIDEST - 3] + "..."
