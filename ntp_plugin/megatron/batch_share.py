"""Runs each replica's own micro-batches, and reports the losses of the global batch.

Megatron keeps counting nominally: consumed samples, the learning-rate schedule and the log follow the global batch.
Only the function that runs micro-batches gets this replica's number of them, and the loader of the training set yields
this replica's samples (`training/samples.py`). Evaluation is shared evenly, as without the plugin.

If a replica's memory requires it (`--ntp-gpu-memory-gb`), its micro-batches are smaller and correspondingly more.
Megatron and the script know their size from an argument, which is set to this replica's size while its micro-batches
run. The loss must then be per token: a mean would differ, since the splits of a micro-batch have different numbers of
counted tokens.

A script reports (sum over tokens, their number), or a mean, for each micro-batch. This is summed over all micro-batches
of all replicas before Megatron sees it, so that the log shows the loss of the global batch.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

from ntp_plugin.megatron.context_loss import by_nominal_parts
from ntp_plugin.megatron.job import JobPlan
from ntp_plugin.megatron.job_shape import rows_of_slots
from ntp_plugin.megatron.padding import padded
from ntp_plugin.megatron.reduction.lane_sync import LaneSync
from ntp_plugin.training.samples import ReplicaSamples, places

type Losses = dict[str, torch.Tensor]
type Kind = tuple[int, torch.dtype]
"""How many numbers a script reports under a name, and their dtype."""


class BatchShare:
    """Replaces Megatron's schedule, and wraps its loaders."""

    def __init__(self, job: JobPlan, sync: LaneSync) -> None:
        self._job, self._sync = job, sync
        self._training_set: Any = None
        self._kinds: dict[bool, Mapping[str, Kind]] = {}

    # ------------------------------------------------ micro-batches

    def schedule(self, original: Any) -> Any:
        """`get_forward_backward_func`."""

        @functools.wraps(original)
        def get(*args: Any, **kwargs: Any) -> Any:
            return functools.partial(self._run, original(*args, **kwargs))

        return get

    def _run(self, run: Any, *, num_microbatches: int, forward_only: bool = False, **kwargs: Any) -> Any:
        count = num_microbatches if forward_only else self._job.runs
        total = num_microbatches * self._job.batch.replicas
        if (
            self._job.args.sequence_parallel
        ):  # divided by the width, this is the number of rows that another stage sends
            rows = rows_of_slots(self._job.args, self._job.layout.width, length=kwargs["seq_length"])
            kwargs["seq_length"] = rows.padded
        if not forward_only:
            kwargs["forward_step_func"] = self._weighed(kwargs["forward_step_func"])
        if count:
            own = count if forward_only else self._job.share.count
            with (
                self._of_their_size(kwargs, forward_only=forward_only),
                self._as_if_of(num_microbatches, kwargs),
                padded(kwargs, own, count),
            ):
                losses = run(num_microbatches=count, forward_only=forward_only, **kwargs)
        else:
            losses = self._run_nothing(**kwargs)
        if kwargs.get("collect_non_loss_data"):
            return losses
        return [self._over_replicas(losses, total, forward_only=forward_only)]

    def _weighed(self, forward_step: Any) -> Any:
        """Return the script's function; its loss weighs tokens as in a context group that has lost nobody."""
        layout = self._job.layout
        parts = layout.topology.cp // layout.context_degree
        if parts == 1 or self._job.args.calculate_per_token_loss:
            return forward_step
        return by_nominal_parts(forward_step, parts)

    @contextlib.contextmanager
    def _of_their_size(self, kwargs: dict[str, Any], *, forward_only: bool) -> Iterator[None]:
        """Set the micro-batch size of this replica while its micro-batches run; an evaluation keeps the nominal
        size."""
        args, nominal = self._job.args, self._job.args.micro_batch_size
        if not forward_only:
            args.micro_batch_size = kwargs["micro_batch_size"] = self._job.share.size
        try:
            yield
        finally:
            args.micro_batch_size = nominal

    @contextlib.contextmanager
    def _as_if_of(self, nominal: int, kwargs: Mapping[str, Any]) -> Iterator[None]:
        """In fp16, have each micro-batch weigh as much as it would in a full-width replica (`LaneSync.scale`).

        Megatron divides a loss by the number of this replica's micro-batches. In fp16 the size of a gradient decides
        whether it overflows, and a degraded replica would skip other steps than a full-width one.
        """
        if not self._sync.weighs_nominally:
            yield
            return
        chunks = kwargs["model"] if isinstance(kwargs["model"], list) else [kwargs["model"]]
        config = get_model_config(chunks[0])
        scale, factor = config.grad_scale_func, self._job.runs / nominal
        config.grad_scale_func = lambda loss: loss * factor if scale is None else scale(loss * factor)
        try:
            yield
        finally:
            config.grad_scale_func = scale

    def _run_nothing(self, *, model: Any, **kwargs: Any) -> list[Any]:
        """Run a replica without micro-batches: it adds zeros, and joins every sum."""
        model = model if isinstance(model, list) else [model]
        per_token = model[0].config.calculate_per_token_loss
        tokens = torch.zeros([], dtype=torch.int, device=next(model[0].parameters()).device)
        self._sync.finalize(model, tokens if per_token else None, pg_collection=kwargs.get("pg_collection"))
        return []

    def _over_replicas(self, losses: list[Losses], total: int, *, forward_only: bool) -> Losses:
        kinds = self._kinds_of(losses, forward_only=forward_only)
        reported, parts = dict[str, Any](), self._job.layout.context_degree
        parts *= 1 if forward_only else self._job.args.micro_batch_size // self._job.share.size
        for name, (numbers, dtype) in kinds.items():
            mine = [loss[name].detach().reshape(-1) / (parts if numbers == 1 else 1) for loss in losses]
            none = torch.zeros(numbers, dtype=dtype, device=self._sync.device)
            summed = self._sync.over_replicas(torch.stack(mine).sum(0) if mine else none)
            reported[name] = summed / total if numbers == 1 else summed
        return reported

    def _kinds_of(self, losses: list[Losses], *, forward_only: bool) -> Mapping[str, Kind]:
        """Return what the script reports; gathered once, because a replica without micro-batches cannot know it."""
        if forward_only not in self._kinds:
            mine = {name: (loss.numel(), loss.dtype) for name, loss in (losses[0] if losses else {}).items()}
            gathered: list[dict[str, Kind]] = [{}] * dist.get_world_size(self._sync.everybody)
            dist.all_gather_object(gathered, mine, group=self._sync.everybody)
            self._kinds[forward_only] = dict(
                sorted({**dict(pair for kinds in gathered for pair in kinds.items())}.items())
            )
        return self._kinds[forward_only]

    # ------------------------------------------------ samples

    def data_sets(self, original: Any) -> Any:
        """`build_train_valid_test_datasets`: remember which one is for training."""

        @functools.wraps(original)
        def build(*args: Any, **kwargs: Any) -> Any:
            sets = original(*args, **kwargs)
            self._training_set = sets[0]
            return sets

        return build

    def loader(self, original: Any) -> Any:
        """`build_pretraining_data_loader`: load the training set by this replica's share."""

        @functools.wraps(original)
        def build(dataset: Any, consumed_samples: int) -> Any:
            make = self.by_share(original) if dataset is self._training_set else original
            return make(dataset, consumed_samples)

        return build

    def by_share(self, original: Any) -> Any:
        """`build_pretraining_data_loader`, for the training set."""

        @functools.wraps(original)
        def build(dataset: Any, consumed_samples: int) -> Any:
            even = original(dataset, consumed_samples)
            if dataset is None:
                return even
            return torch.utils.data.DataLoader(
                dataset,
                batch_sampler=self.samples(dataset, consumed_samples),
                num_workers=even.num_workers,
                pin_memory=even.pin_memory,
                persistent_workers=even.persistent_workers,
                worker_init_fn=even.worker_init_fn,
                collate_fn=even.collate_fn,
            )

        return build

    def firsts(self, _: int) -> list[int]:
        """Return the first sample of each of this replica's micro-batches in the global batch, for any nominal number
        of them."""
        found = [place * self._job.share.size for place in places(self._job.batch, self._job.share)]
        return found + found[-1:] * (self._job.runs - len(found))  # padding repeats the last one

    def samples(self, dataset: Any, consumed: int) -> Any:
        """Return the batch sampler of the training set."""
        return ReplicaSamples(batch_at=self._job.batch_at, consumed=consumed, available=len(dataset))
