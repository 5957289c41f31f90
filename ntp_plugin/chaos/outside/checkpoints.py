"""How far the last checkpoints of two runs are apart, as torch alone reads them.

Looked at are the files that are there under the folders of both runs: `.pt` files as the frameworks write them for each
rank, and folders of torch's distributed checkpoints, whose tensors are whole whatever layout has written them. Nothing
but tensors is taken from a file: for objects of a framework, as DeepSpeed's loss scaler, there are stand-ins.
"""

import math
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

_NUMBER = re.compile(r"\d+")
_NAMED_BY_STEP = re.compile(r"^(?:iter_|global_step|step)\d+$")

Tensors = dict[str, torch.Tensor]


def apart(mine: Path, theirs: Path) -> float | None:
    """The largest relative distance of a tensor; what only one of them has is infinitely far. None: `theirs` has no
    checkpoint."""
    reference = read(theirs)
    if not reference:
        return None
    found = read(mine)
    if found.keys() != reference.keys():
        return math.inf
    return max((_distance(found[name], whole) for name, whole in reference.items()), default=0.0)


def read(run: Path) -> Tensors:
    """All floating-point tensors of the last checkpoint under a folder."""
    found = Tensors()
    for folder in sorted(_last(run)):
        name = folder.relative_to(run).as_posix()
        if folder.is_dir():
            found |= {f"{name}/{key}": tensor for key, tensor in _distributed(folder).items()}
        else:
            found |= {f"{name}/{key}": tensor for key, tensor in _flat(_load(folder))}
    return found


class _StandIn:
    """For an object of a class that is not imported."""

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...


def _load(file: Path) -> Any:
    """What torch has saved in a file, with stand-ins for whatever would have to be imported."""
    names = torch.serialization.get_unsafe_globals_in_checkpoint(file) if zipfile.is_zipfile(file) else []
    with torch.serialization.safe_globals([(type("_StandIn", (_StandIn,), {}), name) for name in names]):
        return torch.load(file, map_location="cpu", weights_only=True)


def _last(run: Path) -> Iterator[Path]:
    """Files and distributed checkpoints of the newest step; those in no folder of a step, too."""
    every = [*run.rglob("*.pt"), *(path.parent for path in run.rglob(".metadata"))]
    of_step = {path: next((part for part in path.parts if _NAMED_BY_STEP.match(part)), None) for path in every}
    newest = max((_step(folder) for folder in of_step.values() if folder is not None), default=0)
    yield from (path for path, folder in of_step.items() if folder is None or _step(folder) == newest)


def _step(name: str) -> int:
    found = _NUMBER.search(name)
    return int(found[0]) if found else 0


def _distributed(folder: Path) -> Tensors:
    reader = FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.full(about.size, torch.nan, dtype=about.properties.dtype)
        for name, about in stored.items()
        if isinstance(about, TensorStorageMetadata) and about.properties.dtype.is_floating_point
    }
    with warnings.catch_warnings():  # it says that it loads in one process, although it was told to
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def _flat(saved: Any, at: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(saved, torch.Tensor):
        if saved.is_floating_point():
            yield at, saved.detach()
    elif isinstance(saved, Mapping):
        for name, value in saved.items():
            yield from _flat(value, f"{at}/{name}")
    elif isinstance(saved, list | tuple):
        for number, value in enumerate(saved):
            yield from _flat(value, f"{at}/{number}")


def _distance(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    if mine.shape != theirs.shape:
        return math.inf
    if not theirs.numel():
        return 0.0
    gap = float((mine.double() - theirs.double()).abs().max())
    return math.inf if math.isnan(gap) else gap / (float(theirs.double().abs().max()) or 1.0)
