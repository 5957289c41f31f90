"""The section that is a training step.

Megatron's `train_step` runs as it is. The vote is put where the optimizer would change something: before it applies
gradients that are reduced and clipped, or where it skips a step because of them. What follows in `train_step` is for
the log: the norm, the losses, the schedule of the learning rate. A rank that a loss keeps from that, after the vote,
tells the same by what it remembers. The losses of the global batch travel with the vote.
"""

import functools
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer.optimizer import SEPARATE_GRAD_NORM_GROUPS

from ntp_plugin.errors import PeerLost
from ntp_plugin.megatron.live.loop import Loop
from ntp_plugin.megatron.live.samples import Samples
from ntp_plugin.megatron.live.trainer import MegatronTrainer
from ntp_plugin.recovery.rank import ElasticRank
from ntp_plugin.telemetry import Committed, Teller

_SOMEBODY_ASKS, _NORM, _LOSSES = range(3)
"""What the numbers of the vote are; the last are as many as the losses have."""

type Losses = list[dict[str, torch.Tensor]]


class TrainingStep:
    """What is put around `train_step` and into the optimizer."""

    def __init__(
        self,
        args: Any,
        loop: Loop,
        rank: ElasticRank,
        trainer: MegatronTrainer,
        *,
        samples: Samples,
        teller: Teller,
    ) -> None:
        self._args, self._loop, self._rank, self._trainer = args, loop, rank, trainer
        self._samples, self._teller = samples, teller
        self._somebody_asks = False
        self._kinds: tuple[int, Mapping[str, int]] | None = None
        """As all said in an epoch, until a step is done."""
        self._losses: Losses = []
        self._global = False
        self._norm: Any = None
        self._skipped = False
        self._scheduler: Any = None
        self._scheduled_before = 0

    def section(self, original: Any) -> Any:
        """`train_step`."""

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            self._scheduler = kwargs.get("opt_param_scheduler", args[4] if len(args) > 4 else None)
            self._scheduled_before = self._scheduler.num_steps
            work, began_at = functools.partial(self._begin, original, *args, **kwargs), time.monotonic()
            result = self._loop.section(work, self._told, is_step=True)
            self._tell(time.monotonic() - began_at)
            return result

        return step

    def _begin(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._somebody_asks:
            self._somebody_asks = False
            if self._rank.doorkeeper.open(mine=dist.get_rank() == 0):
                raise PeerLost("a newcomer comes in")
        self._losses, self._norm, self._skipped = [], None, False
        if self._trainer.idle:
            self._vote(_nothing)
            return self._told()
        return original(*args, **kwargs)

    def reported(self, losses: Losses, *, of_all: bool) -> None:
        """What the micro-batches of this replica reported, or of all replicas already."""
        self._losses, self._global = losses, of_all

    # ------------------------------------------------ the optimizer

    def into(self, optimizer: Any) -> None:
        """Have an optimizer of Megatron's vote before it changes anything, or where it does not because of a norm."""
        for group in SEPARATE_GRAD_NORM_GROUPS:
            optimizer.has_grad_norm_group(group)  # asked of all once, and kept: not in a step, that some may do twice
        step, apply = optimizer.step, optimizer.step_with_ready_grads

        @functools.wraps(step)
        def step_or_skip() -> Any:
            before = self._loop.done
            result = step()
            if self._loop.done == before:
                self._skipped = True
                self._vote(_nothing)
            return result

        @functools.wraps(apply)
        def vote_and_apply() -> Any:
            return self._vote(apply)

        for name in ("get_grad_norm", "clip_grad_norm"):
            setattr(optimizer, name, self._remembered(getattr(optimizer, name)))
        optimizer.step, optimizer.step_with_ready_grads = step_or_skip, vote_and_apply

    def _remembered(self, norm: Any) -> Any:
        @functools.wraps(norm)
        def remembered(*args: Any, **kwargs: Any) -> Any:
            self._norm = norm(*args, **kwargs)
            return self._norm

        return remembered

    def _vote(self, apply: Any) -> Any:
        kinds = self._kinds_of_losses()
        mine = [self._sum(name, size) for name, size in kinds.items()] if self._speaks() else []
        numbers = torch.zeros(_LOSSES + sum(kinds.values()), dtype=torch.float64)
        if mine:
            numbers[_LOSSES:] = torch.cat(mine)
        if self._trainer.first:
            numbers[_NORM] = float(self._norm or 0.0)
        if dist.get_rank() == 0 and self._rank.doorkeeper.somebody_asks():
            numbers[_SOMEBODY_ASKS] = 1
        return self._loop.vote(functools.partial(self._heard, apply), numbers)

    def _heard(self, apply: Any) -> Any:
        self._somebody_asks = bool(self._loop.outcome[_SOMEBODY_ASKS])
        if self._loop.kinds is None:
            assert self._kinds is not None, "the numbers were made of them"
            self._loop.kinds = self._kinds[1]
        return apply()

    # ------------------------------------------------ what is told

    def _kinds_of_losses(self) -> Mapping[str, int]:
        """Name -> how many numbers are reported under it, which only the last stage knows by itself."""
        if self._loop.kinds is not None:
            return self._loop.kinds
        if self._kinds is None or self._kinds[0] != self._rank.groups.epoch:
            mine = {name: value.numel() for name, value in (self._losses[0] if self._losses else {}).items()}
            told: list[dict[str, int]] = [{}] * dist.get_world_size()
            dist.all_gather_object(told, mine)
            self._kinds = self._rank.groups.epoch, dict(sorted(pair for kinds in told for pair in kinds.items()))
        return self._kinds[1]

    def _speaks(self) -> bool:
        if self._global:
            return self._trainer.first
        return bool(parallel_state.get_tensor_model_parallel_rank() == 0)

    def _sum(self, name: str, size: int) -> torch.Tensor:
        values = [loss[name].detach().view(-1).double().cpu() for loss in self._losses if name in loss]
        if not values:
            return torch.zeros(size, dtype=torch.float64)
        if size == 1:
            mean = torch.stack(values).mean(0)
            return mean if self._global else mean / parallel_state.get_data_parallel_world_size()
        return torch.stack(values).sum(0)

    def _told(self) -> tuple[Any, ...]:
        """What `train_step` would have returned."""
        args = self._args
        if not self._skipped and self._scheduler.num_steps == self._scheduled_before:
            samples = get_num_microbatches() * args.micro_batch_size * args.data_parallel_size
            self._scheduler.step(increment=samples * args.gtp_weight_remat_size)
        losses = self._losses_of_all() if parallel_state.is_pipeline_last_stage(ignore_virtual=True) else {}
        norm = float(self._loop.outcome[_NORM]) if self._norm is None else self._norm
        return losses, int(self._skipped), False, False, 0, norm, None, 0

    def _losses_of_all(self) -> dict[str, torch.Tensor]:
        """As the vote summed them."""
        losses, at = {}, _LOSSES
        assert self._loop.kinds is not None, "there was a vote"
        for name, size in self._loop.kinds.items():
            numbers = self._loop.outcome[at : at + size]
            losses[name] = numbers[0] / numbers[1] if size == 2 else numbers
            at += size
        return losses

    def _tell(self, seconds: float) -> None:
        """Whoever looks on hears of the step."""
        if not self._teller.is_heard:
            return
        self._teller.tell(
            Committed(
                step=self._args.curr_iteration + 1,
                epoch=self._rank.groups.epoch,
                seconds=seconds,
                losses={name: float(value.mean()) for name, value in self._losses_of_all().items()},
                samples=list(self._samples.drawn),
            )
        )


def _nothing() -> None:
    """A step that is skipped applies nothing."""
