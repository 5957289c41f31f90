"""Options of the Trainer and its loader that a job with the plugin cannot have, refused by name before it trains."""

from collections.abc import Iterator, Mapping
from typing import Any

from accelerate.data_loader import BatchSamplerShard, DataLoaderShard
from torch.utils.data import IterableDataset

from ntp_plugin.deepspeed.unsupported import refuse_loop


def refuse(trainer: Any, loader: Any, config: Mapping[str, Any], *, resumes: bool) -> None:
    """Raise `Refused` for all options that the job cannot have, before its engine is built.

    Args:
        trainer: The Trainer.
        loader: Its training loader.
        config: The DeepSpeed configuration, with values in place of "auto".
        resumes: Whether the job begins from the copies of a dead one.
    """
    found = (*_of_arguments(trainer.args), *_of_parallelism(trainer, config), *_of_loader(loader), *_of_copies(resumes))
    refuse_loop(found, loop="such a Trainer")


def _of_copies(resumes: bool) -> Iterator[tuple[str, str]]:
    if resumes:
        yield (
            "--ntp-resume has copies which do not hold the Trainer's own state",
            "resume from the Trainer's checkpoint (resume_from_checkpoint)",
        )


def _of_arguments(args: Any) -> Iterator[tuple[str, str]]:
    if args.auto_find_batch_size:
        yield "auto_find_batch_size builds a second engine", "set per_device_train_batch_size"


def _of_parallelism(trainer: Any, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if getattr(trainer.accelerator, "parallelism_config", None) is not None:
        yield "parallelism_config cuts the model or the sequence over the ranks", "train data parallel with ZeRO"
    if config.get("tensor_parallel", {}).get("autotp_size", 0) > 1:
        yield "tensor_parallel.autotp_size > 1 gives several ranks the same batches", "train data parallel with ZeRO"


def _of_loader(loader: Any) -> Iterator[tuple[str, str]]:
    if type(loader) is not DataLoaderShard:
        yield (
            f"the training loader is a {type(loader).__name__}, as with dispatch_batches, so the first rank alone knows"
            " the samples",
            "leave dispatch_batches out of accelerator_config",
        )
        return
    if isinstance(loader.dataset, IterableDataset):
        yield "train_dataset is an IterableDataset, which cannot be rewound", "use one with __len__ and __getitem__"
        return
    if loader.use_stateful_dataloader:
        yield "use_stateful_dataloader draws ahead by itself", "leave it out of accelerator_config"
    shard = loader.batch_sampler
    if type(shard) is not BatchSamplerShard or type(shard.batch_sampler).__name__ == "BatchRebalanceSampler":
        yield (
            "train_sampling_strategy = batch_rebalance, or a batch sampler of one's own, shards by itself",
            "use random, sequential or group_by_length",
        )
        return
    if not shard.even_batches and not shard.drop_last:
        yield "even_batches = false gives ranks different numbers of batches", "leave it out of accelerator_config"
    if loader.synchronized_generator is not None:
        yield (
            "use_seedable_sampler = false makes ranks share a generator in a collective",
            "leave it out of accelerator_config",
        )
