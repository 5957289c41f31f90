"""The section that is a training step: votes, then applies; rebuilds the result if interrupted.

Megatron's `train_step` runs unchanged. The vote comes where the optimizer would change something: before it applies
reduced and clipped gradients, or where it skips a step because of them. What follows in `train_step` is for the log:
the norm, the losses, the learning-rate schedule. If a loss keeps a rank from that after the vote, the rank returns the
same from what it remembers. The losses of the global batch travel with the vote.
"""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
    update_num_microbatches,
)
from megatron.core.optimizer.optimizer import SEPARATE_GRAD_NORM_GROUPS

from ntp_plugin.errors import NotFinite, PeerLost
from ntp_plugin.megatron import router_metrics
from ntp_plugin.megatron.live.loss_scale import LossScale
from ntp_plugin.megatron.live.samples import SampleHooks
from ntp_plugin.megatron.live.step_replay import LoopState
from ntp_plugin.megatron.live.trainer import MegatronTrainer
from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.recovery.job_copies import WORDS, JobCopies
from ntp_plugin.recovery.replica_comparison import ReplicaWatch
from ntp_plugin.recovery.voted_sections import Loop
from ntp_plugin.telemetry import Committed, EventWriter

_SOMEBODY_ASKS, _NORM, _ZEROS, _REJECTED, _SKIPPED, _OVERFLOWED, _COPIES = range(7)
_LOSSES = _COPIES + WORDS
"""Positions in the vector that the vote sums; the last part has one number per value of the losses."""

type Losses = list[dict[str, torch.Tensor]]


class TrainingStep:
    """Wraps `train_step` and the optimizer."""

    def __init__(
        self,
        args: Any,
        loop: Loop,
        rank: ElasticRank,
        trainer: MegatronTrainer,
        *,
        surroundings: LoopState,
        samples: SampleHooks,
        watch: ReplicaWatch,
        event_writer: EventWriter,
    ) -> None:
        self._args, self._loop, self._rank, self._trainer = args, loop, rank, trainer
        self._surroundings, self._samples, self._event_writer = surroundings, samples, event_writer
        self.watch = watch
        loop.not_finite = lambda: watch.not_finite(self._in_the_state)
        self.over = 0
        """Completed training steps, as far as this process took part in them; 0 before the first one."""
        self._rejected = ""
        """Why Megatron would end the job at the step in flight: a result that is not finite."""
        surroundings.catch_up, surroundings.consumed = self.catch_up, self._consumed
        self._somebody_asks = False
        self._kinds: tuple[int, Mapping[str, int]] | None = None
        """The kinds of losses that all ranks reported in an epoch, until a step is done."""
        self._losses: Losses = []
        self._global = False
        self._norm: Any = None
        self._zeros: Any = None
        self._skipped = False
        """Whether the optimizer leaves the weights as they are in this step."""
        self.loss_scale = LossScale()
        self._scheduler: Any = None
        self._scheduled_before = 0
        self._voted = False
        self._take: Callable[[], Any] = _nothing
        """A step, as Megatron last called it."""
        self._again = False
        """Whether the step was over before, and is repeated."""

    def section(self, original: Any) -> Any:
        """`train_step`."""

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            self._scheduler = kwargs.get("opt_param_scheduler", args[4] if len(args) > 4 else None)
            self._scheduled_before = self._scheduler.num_steps
            self._take = functools.partial(original, *args, **kwargs)
            work, began_at = self._begin, time.monotonic()
            result = self._loop.section(work, self._step_result, is_step=True)
            self._record_step(time.monotonic() - began_at)
            return result

        return step

    def _begin(self) -> Any:
        if self._somebody_asks:
            self._somebody_asks = False
            if self._rank.admission_control.open(mine=dist.get_rank() == 0):
                raise PeerLost("a joining rank is admitted")
        self._losses, self._norm, self._zeros, self._skipped = [], None, None, False
        self._voted, self._rejected, self.loss_scale.has_overflowed = False, "", False
        router_metrics.forget()
        if self._trainer.idle:
            self._trainer.have_the_rest()
            self._vote(_nothing)
            return self._step_result()
        result = self._take()
        if not self._voted:  # Megatron has repeated the step with the same result, and would skip it silently
            self.reject("see Megatron's log above")
            self._vote(_nothing)
        return result

    @property
    def _in_the_state(self) -> int:
        """Training steps in this rank's state, while the next one is taken."""
        copies = self._trainer.copies
        return int(self._args.curr_iteration) if copies is None else copies.state_of

    def reject(self, why: str) -> None:
        """Note that a result of the step in flight is not finite: nobody applies it."""
        self._rejected = self._rejected or why

    def compare_at_the_end(self) -> None:
        """Compare replicas after the last step, in a section of its own."""
        self.watch.before_it_counts(self.over)
        self._loop.vote(lambda _: None, torch.zeros(1))

    def _consumed(self) -> int:
        copies, counted = self._trainer.copies, int(self._args.consumed_train_samples)
        behind = copies is not None and copies.state_of < copies.steps
        return self._trainer.how_far.consumed if behind else counted

    def catch_up(self) -> None:
        """Bring the state up to the job, then compare and copy it if due; called before any section."""
        copies = self._trainer.copies
        if not self._loop.in_step:
            self._trainer.have_the_rest()
        if copies is None:
            self.watch.look(self._args.curr_iteration)
            return
        if copies.state_of < copies.steps:  # it has just been restored and compared
            copies.begin()
            self._take_again(copies)
        self.watch.look(copies.steps)
        copies.begin()

    def _take_again(self, copies: JobCopies) -> None:
        """Repeat the steps that are over and not in the state."""
        args = self._args
        while copies.state_of < copies.steps:
            before, self._again = self._surroundings.recall(), True
            update_num_microbatches(args.consumed_train_samples)
            try:
                if self._trainer.idle:
                    self._vote(_nothing)
                    if not self._skipped:
                        self._schedule()
                else:
                    self._take()
                    self._trainer.state.wait_for_weights()
            finally:
                self._again = False
            args.consumed_train_samples += get_current_global_batch_size()
            before.restore()
            self._samples.drawn.clear()  # the step was recorded when it was taken first

    def reported(self, losses: Losses, *, of_all: bool) -> None:
        """Keep what the micro-batches of this replica reported, or of all replicas."""
        self._losses, self._global = losses, of_all

    # ------------------------------------------------ the optimizer

    def into(self, optimizer: Any) -> None:
        """Have an optimizer of Megatron vote before it changes anything, or where it skips a step because of a norm."""
        for group in SEPARATE_GRAD_NORM_GROUPS:
            optimizer.has_grad_norm_group(group)  # cached now: it asks all ranks, and in a step some may ask twice
        step, apply = optimizer.step, optimizer.step_with_ready_grads

        @functools.wraps(step)
        def step_or_skip() -> Any:
            self._voted = self._skipped = self.loss_scale.has_overflowed = False
            self._trainer.have_the_rest()
            if self._args.num_experts:
                router_metrics.add_up_before_the_vote(self._args)
            result = step()
            if not self._voted:
                self._skipped = True
                self._vote(_nothing)
            return result

        @functools.wraps(apply)
        def vote_and_apply() -> Any:
            return self._vote(apply)

        for name in ("get_grad_norm", "clip_grad_norm"):
            setattr(optimizer, name, self._remembered(getattr(optimizer, name)))
        optimizer.count_zeros = self._counted(optimizer.count_zeros)
        optimizer.step, optimizer.step_with_ready_grads = step_or_skip, vote_and_apply

    def _remembered(self, norm: Any) -> Any:
        @functools.wraps(norm)
        def remembered(*args: Any, **kwargs: Any) -> Any:
            self._norm = norm(*args, **kwargs)
            return self._norm

        return remembered

    def _counted(self, count: Any) -> Any:
        @functools.wraps(count)
        def counted() -> Any:
            self._zeros = count()
            return self._zeros

        return counted

    def _vote(self, apply: Any) -> Any:
        kinds = self._kinds_of_losses()
        mine = [self._sum(name, size) for name, size in kinds.items()] if self._is_replica_leader() else []
        numbers = torch.zeros(_LOSSES + sum(kinds.values()), dtype=torch.float64)
        if mine:
            numbers[_LOSSES:] = torch.cat(mine)
        if self._trainer.first:
            numbers[_NORM], numbers[_ZEROS] = float(self._norm or 0.0), float(self._zeros or 0)
            numbers[_SKIPPED], numbers[_OVERFLOWED] = float(self._skipped), float(self.loss_scale.has_overflowed)
        if dist.get_rank() == 0 and self._rank.admission_control.is_requested():
            numbers[_SOMEBODY_ASKS] = 1
        if self._rejected:
            numbers[_REJECTED] = torch.nan
        copies, self._voted = self._trainer.copies, True
        if copies is not None:
            numbers[_COPIES:_LOSSES] = torch.tensor(copies.words())
        if self._again:
            return self._loop.vote_again(functools.partial(self._heard_again, apply), numbers)
        return self._loop.vote(functools.partial(self._heard, apply), numbers)

    def _heard(self, apply: Any, really: bool) -> Any:
        self._refuse_what_is_rejected()
        self._somebody_asks = bool(self._loop.outcome[_SOMEBODY_ASKS])
        self.over = self._args.curr_iteration + 1
        if self._loop.kinds is None:
            assert self._kinds is not None, "the numbers were made from them"
            self._loop.kinds = self._kinds[1]
        copies = self._trainer.copies
        self._skipped = bool(self._loop.outcome[_SKIPPED])  # an idle rank knows only now
        if copies is None:
            return self._changed(apply, self._loop.outcome)
        result = self._heard_again(apply, self._loop.outcome) if really else None
        copies.steps += 1  # not before: a loss during the update may repeat the step
        return result

    def _refuse_what_is_rejected(self) -> None:
        if not bool(torch.isnan(self._loop.outcome[_REJECTED])):
            return
        raise NotFinite(
            f"Megatron has found a result that is not finite in the step after step {self._args.curr_iteration}"
            + (f" ({self._rejected})" if self._rejected else "")
            + (", and all replicas hold the same weights" if self.watch.is_on else ""),
            fix="go on from the last checkpoint with a lower learning rate, or without these samples"
            " (--iterations-to-skip)",
        )

    def _heard_again(self, apply: Any, outcome: torch.Tensor) -> Any:
        copies, members = self._trainer.copies, dist.get_world_size()
        assert copies is not None, "only copies repeat steps"
        copies.heard([int(number) == members for number in outcome[_COPIES:_LOSSES]])
        return copies.stepped(lambda: self._changed(apply, outcome))

    def _changed(self, apply: Any, outcome: torch.Tensor) -> Any:
        """Change the state by a step that is over."""
        self._skipped = bool(outcome[_SKIPPED])
        self.loss_scale.step_is_over(self._trainer.optimizer, overflowed=bool(outcome[_OVERFLOWED]))
        self._trainer.bias.step_is_over()
        if self._skipped:
            self._trainer.state.weights_are_in_place()
        return apply()

    # ------------------------------------------------ what is reported

    def _kinds_of_losses(self) -> Mapping[str, int]:
        """Return name -> how many numbers are reported under it; only the last stage knows it alone."""
        if self._loop.kinds is not None:
            return self._loop.kinds
        if self._kinds is None or self._kinds[0] != self._rank.groups.epoch:
            mine = {name: value.numel() for name, value in (self._losses[0] if self._losses else {}).items()}
            gathered: list[dict[str, int]] = [{}] * dist.get_world_size()
            dist.all_gather_object(gathered, mine)
            self._kinds = self._rank.groups.epoch, dict(sorted(pair for kinds in gathered for pair in kinds.items()))
        return self._kinds[1]

    def _is_replica_leader(self) -> bool:
        if self._global:
            return self._trainer.first
        return bool(parallel_state.get_tensor_model_parallel_rank() == 0)

    def _sum(self, name: str, size: int) -> torch.Tensor:
        values = [loss[name].detach().view(-1).double().cpu() for loss in self._losses if name in loss]
        if not values:
            return torch.zeros(size, dtype=torch.float64)
        if size == 1:
            mean = torch.stack(values).mean(0)
            replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
            return mean if self._global else mean / replicas
        return torch.stack(values).sum(0)

    def _step_result(self) -> tuple[Any, ...]:
        """Return what `train_step` would have returned."""
        copies = self._trainer.copies
        behind = copies is not None and copies.state_of < copies.steps  # the step will be taken again, schedule and all
        if not (self._skipped or behind) and self._scheduler.num_steps == self._scheduled_before:
            self._schedule()
        losses = self._losses_of_all() if parallel_state.is_pipeline_last_stage(ignore_virtual=True) else {}
        overflowed = bool(self._loop.outcome[_OVERFLOWED])
        norm = self._loop.outcome[_NORM] if self._norm is None else self._norm
        counts = not overflowed and self._args.log_num_zeros_in_grad
        zeros = _as_logged(self._loop.outcome[_ZEROS]) if counts else None
        return losses, int(self._skipped), False, False, 0, None if overflowed else _as_logged(norm), zeros, 0

    def _schedule(self) -> None:
        args = self._args
        samples = get_num_microbatches() * args.micro_batch_size * args.data_parallel_size
        self._scheduler.step(increment=samples * args.gtp_weight_remat_size)

    def _losses_of_all(self) -> dict[str, torch.Tensor]:
        """Return the losses that the vote summed."""
        losses, at = {}, _LOSSES
        assert self._loop.kinds is not None, "there was a vote"
        for name, size in self._loop.kinds.items():
            numbers = self._loop.outcome[at : at + size]
            losses[name] = numbers[0] / numbers[1] if size == 2 else numbers
            at += size
        return losses

    def _record_step(self, seconds: float) -> None:
        """Record the committed step."""
        if not self._event_writer.is_recording:
            return
        self._event_writer.write(
            Committed(
                step=self._args.curr_iteration + 1,
                epoch=self._loop.voted_in,
                seconds=seconds,
                losses={name: float(value.mean()) for name, value in self._losses_of_all().items()},
                samples=list(self._samples.drawn) if self._trainer.records_samples else [],
            )
        )


def _nothing() -> None:
    """Apply nothing, in a skipped step."""


def _as_logged(number: Any) -> float:
    """Return a number as Megatron logs it: in float32. Some kernels give a norm as a tensor with one number."""
    return float(torch.as_tensor(number).float())
