"""Drives the accumulation window from the Trainer's own loop, which does not notice a loss.

The Trainer calls `training_step` once for each micro-batch of its nominal rank. What a call computes is decided here:
the next micro-batch of this rank's share, more of them while other ranks are lost, or those of a whole step again after
a recovery that restarted the accumulation window. The call returns when the share is as far as the Trainer believes,
and the last call of a step when the step is taken. So the Trainer counts its steps, epochs, logs and schedules as in a
run without losses.

Between two steps the Trainer runs collectives: numbers of labelled tokens, the mean of a log line, an evaluation. Each
is a voted section (`recovery/voted_sections.py`): a rank that has left it knows that all have ended it. With ZeRO a
recovery may take the state back by a step. That step is taken again before anything else: at the next call, or before
the section in flight runs again. All ranks do so at the same place in the order of sections.
"""

import copy
import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ntp_plugin.deepspeed.accumulation_window import AccumulationWindow
from ntp_plugin.deepspeed.checkpoints import WentBack
from ntp_plugin.deepspeed.hf.batches import BatchBook
from ntp_plugin.deepspeed.hf.evaluation import NominalRows
from ntp_plugin.deepspeed.hf.joining import Progress
from ntp_plugin.deepspeed.hf.loader import TrainerFeed
from ntp_plugin.deepspeed.hf.steps import Step, due
from ntp_plugin.deepspeed.hf.trl_tokens import TrlTokens
from ntp_plugin.deepspeed.hf.world import World
from ntp_plugin.deepspeed.whose_loop import UserDraws
from ntp_plugin.errors import Refused
from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.recovery.voted_sections import Loop

type TrainingStep = Callable[..., torch.Tensor]
_STEPS_KEPT = 3


class TrainerLoop(UserDraws):
    """The loop of one Trainer."""

    now: "ClassVar[TrainerLoop | None]" = None
    """The one that trains in this process."""

    def __init__(
        self, trainer: Any, loader: Any, *, window: AccumulationWindow, rank: ElasticRank, loop: Loop, nominal: int
    ) -> None:
        self.trainer, self.window, self._rank, self._loop, self.nominal = trainer, window, rank, loop, nominal
        super().__init__(1)  # accelerate calls the engine's `step` once for each step
        self._each = int(trainer.deepspeed.gradient_accumulation_steps())
        self.book = BatchBook(loader)
        self._feed = TrainerFeed(loader)
        self.world = World(trainer, rank)
        self._tokens = TrlTokens(trainer, nominal=nominal)
        self._step_of: TrainingStep | None = None
        """The Trainer's own `training_step`."""
        self.steps: deque[Step] = deque(maxlen=_STEPS_KEPT)
        self.done = 0
        """Steps that the Trainer has taken."""
        self.drawn = 0
        """Micro-batches that it has drawn in the data epoch."""
        self._calls = 0
        self.unlogged = 0.0
        """The losses of all ranks that are not logged yet."""
        self.logged_in = rank.groups.epoch
        """The epoch of the last log line."""
        self.joins_at: Progress | None = None
        """Where a joining rank comes in, until its Trainer is there."""
        self.rows: NominalRows | None = None
        """The loader of an evaluation while ranks are lost."""
        self.makes_step = False
        """Whether the Trainer is drawing the micro-batches of a step."""
        window.around = self
        window.follow(self._feed)

    # ------------------------------------------------ asked by the accumulation window

    def share(self, step: int, numbers: Sequence[int]) -> Sequence[int]:
        """Return which of these micro-batches a step has; with ZeRO-3 all ranks have as many, and repeat the last."""
        found = self._find(step)
        return numbers if found is None else self._padded(found, self._distinct(found))

    def order(self, _followed: Any, _step: int, share: Sequence[int]) -> Sequence[int]:
        """Return the share itself."""
        return share

    def _distinct(self, step: Step) -> list[int]:
        return list(dict.fromkeys(step.share(self.window.numbers, self._each)))

    def _padded(self, step: Step, share: list[int]) -> list[int]:
        if not self.window.gathers_weights:
            return share
        shares = self.window.replicas.shares.values()
        return share + share[-1:] * (max(len(step.share(one, self._each)) for one in shares if one) - len(share))

    def losses_in(self, _step_batch: int) -> int:
        """Return the nominal ranks: the Trainer's losses are parts of a mean already."""
        return self.nominal

    def counted_here(self) -> float:
        """Return the tokens that a trainer of TRL has counted in this rank's share."""
        return self._tokens.of_share()

    def may_admit(self) -> bool:
        """Whether all ranks are at the first micro-batch of a new step."""
        return self.window.step == self.done and bool(self.steps) and self.steps[-1].number == self.done

    def progress(self) -> Progress:
        """Return where the Trainer is."""
        return Progress.of(self)

    def take_progress(self, progress: Progress) -> None:
        """Keep where the others are, on a joining rank."""
        self.joins_at = progress
        self.steps.extend(progress.steps)
        self.done = progress.done

    def _find(self, number: int) -> Step | None:
        return next((step for step in self.steps if step.number == number), None)

    # ------------------------------------------------ a step

    def draw_step(self, original: Callable[..., Any], *args: Any) -> Any:
        """`get_batch_samples`: draw the micro-batches of a step, and count what the loss is divided by."""
        self.makes_step, self._calls = True, 0
        try:
            return original(self.trainer, *args)
        finally:
            self.makes_step = False

    def count_items(self, original: Callable[..., Any], batches: Sequence[Any], device: Any) -> Any:
        """`_get_num_items_in_batch` of a step: the number over the nominal global batch."""
        self.makes_step = False
        self.world.follow()
        known = self._find(self.done)
        if known is not None and self.joins_at is not None:  # this rank joins in this step, and the others have counted
            known.own, self.drawn, self.joins_at = batches, self.drawn + len(batches), None
            return self._items_of(known, original, self._replica, device)
        if not batches:
            return None
        step = Step(
            number=self.done,
            data_epoch=self.book.data_epoch,
            first=self.drawn,
            count=len(batches),
            own=batches,
            tokens_before=self._tokens.total,
            groups=self._groups(),
        )
        self.drawn += len(batches)
        self.steps.append(step)
        here = _local(original, self.trainer, batches, device)
        step.counts_items = here is not None
        if step.counts_items and self.trainer.args.average_tokens_across_devices:
            count = functools.partial(self._count, step, original, device)
            step.items = int(self.sums(lambda: [float(count())])[0])
        return self._items_of(step, original, self._replica, device)

    def _count(self, step: Step, original: Callable[..., Any], device: Any) -> int:
        share = self._distinct(step)
        found = _local(original, self.trainer, [self._inputs(step, number) for number in share], device)
        return int(found)

    def _items_of(self, step: Step, original: Callable[..., Any], replica: int, device: Any) -> Any:
        """Return what a nominal rank divides its losses by."""
        if not step.counts_items:
            return None
        if step.items is not None:
            return torch.tensor(step.items, device=device)
        numbers = range(replica * self._each, replica * self._each + step.count)
        return _local(original, self.trainer, [self._inputs(step, number) for number in numbers], device)

    def count_row(self, original: Callable[..., Any], batches: Sequence[Any], device: Any) -> Any:
        """`_get_num_items_in_batch` in an evaluation: of the nominal ranks' batches of the row."""
        if self.rows is None or not self.trainer.args.average_tokens_across_devices:
            return original(self.trainer, batches, device)
        with self.world.present():
            return self.rows.count_items(lambda batch: _local(original, self.trainer, [batch], device), batches[0])

    def train(self, original: TrainingStep, items: Any) -> torch.Tensor:
        """`training_step`: bring this rank's share as far as the Trainer believes.

        Args:
            original: The Trainer's own.
            items: What it divides the losses of this nominal rank by.
        """
        step = self._find(self.done)
        if step is None or self._calls >= step.count:
            raise Refused(
                "the Trainer trains on micro-batches that get_batch_samples has not drawn",
                fix="call Trainer.get_batch_samples in a get_batch_samples of your own",
            )
        self._step_of, call = original, self._calls
        self._calls += 1
        loss: torch.Tensor | None = None
        while True:
            self.catch_up()
            share = self.share(step.number, self.window.numbers)
            if self.window.step > step.number or self.window.done >= due(len(share), call, step.count):
                break
            is_own = self._number(step, call) == share[self.window.done]
            found = self._compute(step, items if is_own else None)
            loss = found if loss is None else loss
        if self.window.step > step.number:
            self._taken(step)
        self.world.follow()
        return loss if loss is not None else torch.zeros((), device=self.trainer.args.device)

    def _number(self, step: Step, call: int) -> int:
        return self._replica * self._each + min(call, step.count - 1)

    def _taken(self, step: Step) -> None:
        self.done = step.number + 1
        self.unlogged += self.window.loss_of_all() / self.nominal
        own = range(self._replica * self._each, (self._replica + 1) * self._each)
        for number in self._distinct(step):
            if number not in own:
                self.trainer.current_flos += float(self.trainer.floating_point_ops(self._inputs(step, number)))

    def catch_up(self) -> None:
        """Take steps again that a recovery has undone."""
        went_back = self.window.step < self.done
        while self.window.step < self.done:
            step = self._find(self.window.step)
            assert step is not None, "the newest steps are kept"
            self._compute(step, None)
        if went_back:
            self._set_rates()

    def _set_rates(self) -> None:
        """Set the learning rates of the Trainer's own schedule, which has not gone back; the engine's has."""
        engine, schedule = self.trainer.deepspeed, self.trainer.lr_scheduler
        if engine.lr_scheduler is None and schedule is not None:
            for group, rate in zip(engine.basic_optimizer.param_groups, schedule.get_last_lr(), strict=True):
                group["lr"] = rate

    def _compute(self, step: Step, items: Any) -> Any:
        """Compute the next micro-batch of this rank's share; a loss may undo it."""
        trainer, window, original = self.trainer, self.window, self._step_of
        share = self.share(step.number, window.numbers)
        number = share[window.done]
        if not window.done:
            self._set_groups(step)
        if items is None:
            items = self._items_of(
                step, type(trainer)._get_num_items_in_batch, number // self._each, trainer.args.device
            )
        inputs = copy.copy(self._inputs(step, number))
        trainer.accelerator.gradient_state._set_sync_gradients(window.done == len(share) - 1)
        trainer.current_gradient_accumulation_steps = step.count
        self._feed.give()
        repeats = number in share[: window.done]
        self._tokens.begin_micro_batch(step.tokens_before, first=not window.done, repeats=repeats)
        assert original is not None, "a step comes from a call of it"
        with self.world.nominal(), self.world.gathers_alone(lambda: window.degraded or window.is_stale):
            found = window.through(lambda: original(trainer, trainer.model_wrapped, inputs, items))
        self._tokens.end_micro_batch()
        if window.step > step.number:
            self._tokens.set(step.tokens_before + round(window.counted_by_all()))
        trainer.accelerator.gradient_state._set_sync_gradients(True)
        return None if found is None else found[0]

    def _inputs(self, step: Step, number: int) -> Any:
        replica, place = divmod(number, self._each)
        if replica == self._replica and step.own:
            return step.own[place]
        return self.book.draw(step.data_epoch, replica, step.first + place)

    @property
    def _replica(self) -> int:
        return self._rank.place.slot

    def _groups(self) -> list[dict[str, Any]]:
        groups = self.trainer.deepspeed.basic_optimizer.param_groups
        return [{name: value for name, value in group.items() if name != "params"} for group in groups]

    def _set_groups(self, step: Step) -> None:
        """Set the learning rates of the step: the Trainer's scheduler may be past it."""
        groups = self.trainer.deepspeed.basic_optimizer.param_groups
        for group, values in zip(groups, step.groups, strict=True):
            group.update(values)

    # ------------------------------------------------ between two steps

    def section[Result](self, work: Callable[[], Result]) -> Result:
        """Run work with collectives through losses, on all ranks at the same place; again after a loss in it."""
        if self._loop.inside:
            return work()
        while True:
            self.catch_up()
            self.world.follow()
            found: list[Result] = []
            try:
                self.window.section(functools.partial(self._attempt, work, found), lambda: None)
            except WentBack:
                continue
            self.world.follow()
            return found[-1]

    def _attempt(self, work: Callable[[], Any], found: list[Any]) -> None:
        self._refuse_to_be_behind()
        found.append(work())
        self._loop.vote(lambda _: None, self.window.no_words())

    def _refuse_to_be_behind(self) -> None:
        self.world.follow()
        if self.window.step < self.done:
            raise WentBack

    def sums(self, numbers: Callable[[], list[float]]) -> list[float]:
        """Return the sums over all ranks of the numbers that each has then."""
        if self._loop.inside:
            return [float(number) for number in _summed(numbers())]
        while True:
            self.catch_up()
            try:
                self.window.section(functools.partial(self._vote_on, numbers), lambda: None)
            except WentBack:
                continue
            self.world.follow()
            return [float(number) for number in self._loop.outcome]

    def _vote_on(self, numbers: Callable[[], list[float]]) -> None:
        self._refuse_to_be_behind()
        self._loop.vote(lambda _: None, torch.tensor(numbers(), dtype=torch.float64))

    def until_whole(self, save: Callable[[], None]) -> None:
        """Save until nobody is lost meanwhile, with all ranks together: the first rank writes after the last section of
        a checkpoint, and the next one must know whether it has ended that."""
        while True:
            self.catch_up()
            self.world.follow()
            epoch = self._rank.groups.epoch
            save()
            if not self.sums(functools.partial(self._spoiled, epoch))[0]:
                return

    def _spoiled(self, epoch: int) -> list[float]:
        return [float(self._rank.groups.epoch != epoch or self.window.checkpoints.owes)]

    @property
    def _has_shared(self) -> bool:
        """Whether ranks had other micro-batches than their nominal ones since the last log line."""
        return self.window.degraded or self.logged_in != self._rank.groups.epoch

    def mean_loss(self, gather: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the losses since the last log line, as each rank has them in a run without losses in the mean."""

        def work() -> torch.Tensor:
            return torch.tensor(self.unlogged) if self._has_shared else gather()

        found = self.section(work)
        self.unlogged, self.logged_in = 0.0, self._rank.groups.epoch
        return found

    def tokens_seen(self, tokens_in: Callable[[Any], int]) -> int | None:
        """Return the tokens of the newest step over all ranks, once it is taken; None before.

        Args:
            tokens_in: Counts those of one micro-batch.
        """
        step = self.steps[-1]
        if step.number >= self.done:
            return None

        def here() -> list[float]:
            share = self._distinct(step)
            return [float(sum(tokens_in(self._inputs(step, number)) for number in share))]

        return int(self.sums(here)[0])


def _local(original: Callable[..., Any], trainer: Any, batches: Sequence[Any], device: Any) -> Any:
    """Return the number of labelled tokens in these batches alone."""
    args = trainer.args
    averages, args.average_tokens_across_devices = args.average_tokens_across_devices, False
    try:
        return original(trainer, list(batches), device)
    finally:
        args.average_tokens_across_devices = averages


def _summed(numbers: list[float]) -> torch.Tensor:
    summed = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(summed)
    return summed
