"""Read a checkpoint with torch alone, and run a job in two halves: the second loads what the first saved."""

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from tests.harness.parity.job import STEPS, Seen, Whole, with_losses

HALF = STEPS // 2


def saving(folder: Path) -> str:
    """The arguments of a run that ends in the middle, and saves there."""
    return f"--save {folder} --save-interval {HALF} --exit-interval {HALF}"


def loading(folder: Path) -> str:
    """The arguments of the second run."""
    return f"--load {folder}"


def replica_digests_in(folder: Path, step: int = HALF) -> Whole:
    """All tensors of a checkpoint: weights, and what the optimizer keeps for them."""
    reader = FileSystemReader(folder / f"iter_{step:07d}")
    stored = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.full(about.size, torch.nan, dtype=about.properties.dtype)
        for name, about in stored.items()
        if isinstance(about, TensorStorageMetadata)
    }
    with warnings.catch_warnings():  # it warns about loading in one process, although it was asked to
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load(tensors, storage_reader=reader, no_dist=True)
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}


def largest_difference(mine: Whole, theirs: Whole) -> float:
    """The largest relative difference of a tensor; what only one of them has is infinitely different."""
    if {name: whole.shape for name, whole in mine.items()} != {name: whole.shape for name, whole in theirs.items()}:
        return float("inf")
    scales = {name: float(np.abs(whole).max()) or 1.0 for name, whole in theirs.items()}
    return max(float(np.abs(whole - theirs[name]).max()) / scales[name] for name, whole in mine.items())


def joined(first: Mapping[int, Seen], second: Mapping[int, Seen]) -> dict[int, Seen]:
    """Both halves of a run as the ranks of the second saw them, which may be others than those of the first."""
    before = with_losses(first)[0]
    return {
        rank: dataclasses.replace(
            seen,
            losses=[*before.losses, *seen.losses] if seen.losses else [],
            steps_with_loss=[*before.steps_with_loss, *seen.steps_with_loss] if seen.losses else [],
            norms=[*before.norms, *seen.norms],
            rates=[*before.rates, *seen.rates],
        )
        for rank, seen in second.items()
    }
