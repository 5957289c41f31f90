"""What a loop with accelerate cannot have, refused by name before it trains."""

from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard
from torch.utils.data import IterableDataset

from ntp_plugin.deepspeed.unsupported import refuse_loop
from ntp_plugin.errors import Refused

_LEAVE_OUT = "leave it out of DataLoaderConfiguration"


def refuse_settings(accelerator: Any, *, tp: int, resumes: bool) -> None:
    """Raise `Refused` for all settings of an `Accelerator` with which its loop cannot go on after a loss.

    Args:
        accelerator: The script's.
        tp: Slots of a replica.
        resumes: Whether the job begins from the copies of a dead one.
    """
    found = [*_of_accelerator(accelerator, tp)]
    if resumes:
        what = "--ntp-resume has copies which do not hold the state of a loop with accelerate"
        found.append((what, "resume from a checkpoint (accelerator.save_state and load_state)"))
    refuse_loop(found, loop="such a loop")


def _of_accelerator(accelerator: Any, tp: int) -> Iterator[tuple[str, str]]:
    if tp > 1 or getattr(accelerator, "parallelism_config", None) is not None:
        yield (
            "tensor_parallel, an mpu or parallelism_config gives several ranks the same batches",
            "train data parallel with ZeRO",
        )
    for loader in accelerator._dataloaders:
        if type(loader) is DataLoaderDispatcher:
            yield (
                "dispatch_batches, or an IterableDataset, has the first rank alone read the samples",
                "leave dispatch_batches out, and use a data set with __len__ and __getitem__",
            )
    if accelerator.split_batches:
        yield "split_batches cuts a batch by the number of ranks", _LEAVE_OUT
    if not accelerator.step_scheduler_with_optimizer:
        yield (
            "step_scheduler_with_optimizer = False steps the schedule once for each micro-batch, of which ranks have"
            " more while others are lost",
            "leave it out, and the schedule follows the optimizer's steps",
        )


def why_not_followed(loader: Any) -> tuple[str, str] | None:
    """Return why a loader cannot be trained on, and what to do; None if it can."""
    if type(loader) is not DataLoaderShard:
        return (
            f"the training loader is a {type(loader).__name__}, whose samples the other ranks do not know",
            "prepare a DataLoader of torch's",
        )
    if isinstance(loader.dataset, IterableDataset):
        return "the data set is an IterableDataset, which cannot be rewound", "use one with __len__ and __getitem__"
    shard = loader.batch_sampler
    if type(shard) is not BatchSamplerShard or loader.skip_batches:
        return (
            f"the batches of the training loader come from a {type(shard).__name__}, as with skip_first_batches, so"
            " those of other ranks are not known",
            "prepare a DataLoader with a sampler or a batch_sampler, and resume where a data epoch begins",
        )
    return _why_not_rewound(loader, shard)


def _why_not_rewound(loader: Any, shard: Any) -> tuple[str, str] | None:
    if loader.use_stateful_dataloader:
        return "use_stateful_dataloader draws ahead by itself", _LEAVE_OUT
    if not shard.even_batches and not shard.drop_last:
        return "even_batches = False gives ranks different numbers of batches", _LEAVE_OUT
    if set(loader.rng_types or ()) - {"generator"}:
        return (
            f"rng_types = {list(loader.rng_types)} has ranks draw alike, and what is drawn again would differ",
            "leave rng_types out of Accelerator",
        )
    return None


def refuse_steps_of_two_data_epochs(accelerator: Any, micro_batches: int) -> None:
    """Raise `Refused` if a step may have micro-batches of two data epochs.

    Args:
        accelerator: The script's.
        micro_batches: The length of its training loader.
    """
    each = accelerator.gradient_accumulation_steps
    if not accelerator.gradient_state.sync_with_dataloader and micro_batches % each:
        raise Refused(
            f"sync_with_dataloader = False, and a data epoch of {micro_batches} micro-batches ends within a step of"
            f" {each}",
            fix="leave sync_with_dataloader out of GradientAccumulationPlugin",
        )
