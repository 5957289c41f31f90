"""Drives the accumulation window from a user's own loop with accelerate.

The loop draws a micro-batch for each iteration, and accelerate decides in `accumulate` whether the iteration ends a
step. Here this follows from this rank's share: while other ranks are lost a step has more iterations, and an iteration
that a loss has made stale ends none. After `accelerator.backward`, `accelerator.sync_gradients` says whether the
iteration has taken a step for the first time. So a script that counts its steps by it, and a schedule that it steps,
agree with a run without losses.

All ranks run the same iterations. A rank with fewer micro-batches than another one repeats its last, which counts for
nothing. A recovery makes all draws stale up to the newest draw of any rank (`line_up`). So collectives of the loop meet
their own kind: each is a voted section (`recovery/voted_sections.py`), and a rank that has left it knows that all have
been in it.

With ZeRO a recovery may take the state back by a step, as long as copies of that step are not complete. So the first
collective after a step waits for these, and so does the end of a data epoch. If the loss comes before that, the
collective is not run with the others: each rank gets its own value, and the loop takes the step again.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DeepSpeedSchedulerWrapper

from ntp_plugin.deepspeed.accelerate_loop.feed import LoopFeed
from ntp_plugin.deepspeed.accelerate_loop.joining import AcceleratePosition, Reports
from ntp_plugin.deepspeed.accelerate_loop.refusals import (
    refuse_settings,
    refuse_steps_of_two_data_epochs,
    why_not_followed,
)
from ntp_plugin.deepspeed.accelerate_loop.world import AccelerateWorld
from ntp_plugin.deepspeed.accumulation_window import AccumulationWindow
from ntp_plugin.deepspeed.checkpoints import WentBack
from ntp_plugin.deepspeed.loaders import Loaders
from ntp_plugin.deepspeed.whose_loop import UserDraws
from ntp_plugin.errors import Refused, StateLost
from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.recovery.voted_sections import Loop

_LOG = logging.getLogger(__name__)
_RATES_KEPT = 3


class AccelerateLoop(UserDraws):
    """The loop of one script with an `Accelerator`."""

    now: "ClassVar[AccelerateLoop | None]" = None
    """The one of this process."""

    def __init__(
        self, accelerator: Any, *, window: AccumulationWindow, rank: ElasticRank, loop: Loop, nominal: int, tp: int
    ) -> None:
        super().__init__(1)  # accelerate calls the engine's `step` once for each step
        self.accelerator, self.window, self._rank, self._loop = accelerator, window, rank, loop
        self._nominal, self._tp = nominal, tp
        self._engine: Any = accelerator.deepspeed_engine_wrapped.engine
        self._each = int(self._engine.gradient_accumulation_steps())
        self.world = AccelerateWorld(rank)
        self._feeds: dict[int, LoopFeed] = {}
        self._feed: LoopFeed | None = None
        """The loader that the loop trains on."""
        self._why_not: tuple[str, str] | None = None
        """Why the loader that was drawn from last cannot be trained on."""
        self._reports = Reports(rank)
        self._is_ready = self._meets = self._accumulates = False
        self._newest = 0
        """The newest step that the loop has seen taken."""
        self._calls = self._alone_until = 0
        """Collectives of the loop, and up to which of them each rank is alone."""
        self._settled = -1
        """The newest step whose copies were waited for."""
        self._is_within = self._has_warned = False
        """Whether a micro-batch is drawn and has had no backward; whether a gather there was warned of."""
        self._rates: dict[int, list[dict[str, Any]]] = {}
        self.passing = rank.place.joining
        """Whether the script of a joining rank runs through what the job has behind it."""
        self._passed = 0
        self._joins_at: AcceleratePosition | None = None
        self._found: Any = None
        if self.passing:
            self._engine.forward = self._forward_while_passing(self._engine.forward)
        window.around = self

    # ------------------------------------------------ asked by the accumulation window

    def share(self, step: int, numbers: Sequence[int]) -> Sequence[int]:
        """Return which micro-batches a step has; while ranks are lost all have as many, and repeat the last."""
        return numbers if self._feed is None else self._share_of(self._feed, step, numbers)

    def _share_of(self, feed: LoopFeed, step: int, numbers: Sequence[int]) -> Sequence[int]:
        count = feed.count(step)
        mine = self._of_step(numbers, count)
        if not self.window.degraded:
            return mine
        rounds = max(len(self._of_step(one, count)) for one in self.window.replicas.shares.values())
        return mine + mine[-1:] * (rounds - len(mine))

    def _of_step(self, numbers: Sequence[int], count: int) -> list[int]:
        return list(dict.fromkeys(number for number in numbers if number % self._each < count))

    def order(self, followed: Any, step: int, share: Sequence[int]) -> Sequence[int]:
        """Return the share itself; the step begins, or begins again with the learning rates that it had."""
        if self._feed is None:
            refuse_steps_of_two_data_epochs(self.accelerator, followed.length)
        self._feed = followed
        self._reports.report(step, followed.index)
        groups = self._engine.basic_optimizer.param_groups
        if step not in self._rates:
            self._rates[step] = [{name: value for name, value in group.items() if name != "params"} for group in groups]
            self._rates.pop(step - _RATES_KEPT, None)
        for group, values in zip(groups, self._rates[step], strict=True):
            group.update(values)
        return share

    def losses_in(self, step_batch: int) -> int:
        """Return the micro-batches of the step that was just taken."""
        feed, step = self._feed, self.window.step - 1
        return step_batch if feed is None else step_batch // self._each * feed.count(step)

    def may_admit(self) -> bool:
        """Whether the loop is between two steps: there all ranks are about to draw."""
        return self._meets

    def unfollowed(self) -> Refused:
        """Return why the loop cannot train on what it draws."""
        what, fix = self._why_not or (
            "the engine trains on a batch that no prepared DataLoader has yielded",
            "pass the training DataLoader through accelerator.prepare, and draw one batch for each forward",
        )
        return Refused(f"{what}, and such a loop cannot go on after a loss", fix=fix)

    def progress(self) -> AcceleratePosition:
        """Return where the loop is."""
        assert self._feed is not None, "ranks join a loop that trains"
        return AcceleratePosition(
            step=self.window.step,
            newest=self._newest,
            draws=dict(self._feed.book.draws),
            rates=dict(self._rates),
            schedules=[schedule.state_dict() for schedule in self._schedules],
        )

    def take_progress(self, progress: AcceleratePosition) -> None:
        """Keep where the others are, on a joining rank."""
        self._joins_at = progress

    def line_up(self) -> None:
        """Agree, in a recovery, up to which draw and collective of the loops the iteration in flight goes on."""
        feed = self._feed
        draws, step = (0, 0) if feed is None else (feed.draws, (feed.begun - 1) * feed.steps)
        mine = (draws, self._calls, self._newest, 0 if self.passing else max(step, 0))
        newest_of_all = torch.tensor(mine, device=self.accelerator.device)
        dist.all_reduce(newest_of_all, dist.ReduceOp.MAX)
        draws, calls, newest, begun = newest_of_all.tolist()
        if begun > self.window.step:
            raise StateLost(
                f"a rank was lost after the last step of a data epoch, and its part of the optimizer's state is copied"
                f" only up to step {self.window.step}; the loop of a rank is past step {begun} already",
                fix="resume from the last checkpoint; with copies.lag_steps = 0 the loop waits for the copies",
            )
        if feed is not None:
            feed.stale_until = draws
        if self.passing:
            self._calls = calls
            if feed is not None:
                feed.draws = draws
        if newest > self.window.step:
            self._alone_until = calls
        self._settled = -1  # a rank that joins has not waited for copies, and all must decide alike
        if not self.passing:
            self.world.follow()

    @property
    def epoch(self) -> int:
        """The version of the membership."""
        return self._rank.groups.epoch

    # ------------------------------------------------ drawing

    def begin(self) -> None:
        """Do what must come before the first draw or collective."""
        if self.passing and not self._is_ready:
            self.world.be_nobody()
        if self._is_ready or self.passing:
            return
        self._is_ready = True
        self._begin_with_first_loader()
        self.world.follow()

    def _begin_with_first_loader(self) -> None:
        """Begin the job; the data set of the first loader is compared across ranks."""
        self._refuse()
        loaders, before = self.accelerator._dataloaders, Loaders.last
        Loaders.last = None
        if loaders and why_not_followed(loaders[0]) is None:
            Loaders.last = self._feed_of(loaders[0])  # type: ignore[assignment]
        self.window.begin()
        Loaders.last = before

    def _refuse(self) -> None:
        refuse_settings(self.accelerator, tp=self._tp, resumes=self._rank.place.resume is not None)

    def _feed_of(self, loader: Any) -> LoopFeed:
        if id(loader) not in self._feeds:
            known = [id(one) for one in self.accelerator._dataloaders]
            index = known.index(id(loader)) if id(loader) in known else -1
            self._feeds[id(loader)] = LoopFeed(loader, index=index, each=self._each, replica=self._rank.place.slot)
        return self._feeds[id(loader)]

    def iterate(self, loader: Any, original: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        """`DataLoaderShard.__iter__`."""
        self.begin()
        self._why_not = why_not_followed(loader)
        evaluates = self._feed is not None and self._feed.loader is not loader
        if self._why_not is None and not evaluates:
            yield from self._data_epoch(self._feed_of(loader))
        elif self.passing:
            yield from self._one_batch(loader, original)
        else:
            epoch = self.epoch
            yield from original(self._over_present_ranks(loader))
            if self.epoch != epoch:
                _LOG.warning("a rank was lost in an evaluation: its samples are missing in what the loop gathers")

    def _over_present_ranks(self, loader: Any) -> Any:
        """Have the loader of an evaluation share its batches among the ranks that are there."""
        for sharded in (loader.batch_sampler, loader.dataset):
            if hasattr(sharded, "num_processes") and hasattr(sharded, "process_index"):
                sharded.num_processes, sharded.process_index = dist.get_world_size(), dist.get_rank()
        return loader

    def _one_batch(self, loader: Any, original: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        """Yield one batch of a loader that the job does not train on: its evaluation is over."""
        for batch in original(loader):
            loader.end_of_dataloader = True
            yield batch
            break
        loader.end()

    def _data_epoch(self, feed: LoopFeed) -> Iterator[Any]:
        if feed.trains and not feed.is_over(feed.begun - 1):
            raise Refused(
                f"the loop left its training loader in data epoch {feed.begun - 1}, before the end",
                fix="let it go to the end of the loader; a smaller data set makes data epochs shorter",
            )
        loader = feed.loader
        if loader.rng_types is not None and not self.passing:
            _synchronize(loader)
        epoch = feed.begin_data_epoch()
        if self.passing and self._reports.loader not in (None, feed.index):
            yield feed.any_batch()  # an evaluation that comes before the training
            feed.end_data_epoch()
            return
        if not self.passing:
            feed.read_own()
        while True:
            if self.passing and self._passed // feed.steps > epoch:
                break
            if self.passing and self._passes(feed, epoch):
                yield feed.last
                continue
            self._meet(feed, epoch)
            if feed.draws < feed.stale_until:
                yield feed.draw_stale()
                continue
            if feed.is_over(epoch):
                if feed.trains and self._settles():
                    continue
                break
            if feed.trains and feed.in_hand:
                raise Refused(
                    "the loop has drawn a micro-batch and not trained on it",
                    fix="draw one micro-batch for each forward, and train on each",
                )
            batch = feed.draw(self._share_of(feed, feed.stream.step, feed.stream.numbers))
            Loaders.last, self._accumulates = feed, False  # type: ignore[assignment]
            self._is_within = True
            yield batch
        feed.end_data_epoch()

    def _meet(self, feed: LoopFeed, epoch: int) -> None:
        """Let joining ranks in, before the first micro-batch of a step is drawn."""
        if not feed.trains or feed.stream.place or feed.draws < feed.stale_until or feed.is_over(epoch):
            return
        self._meets = True
        try:
            self.window.meet()
        finally:
            self._meets = False

    def _settles(self) -> bool:
        """Wait for the copies of a data epoch's last step; return whether a loss has undone the step meanwhile."""
        if self.window.copies is None or self._settled == self.window.step:
            return False
        before = self.window.step
        self.section(_nothing, _nothing)
        return self.window.step < before

    # ------------------------------------------------ a joining rank

    def _passes(self, feed: LoopFeed, epoch: int) -> bool:
        """Whether the next iteration is one of those that the job has behind it."""
        if feed.last is None:
            feed.last = feed.any_batch()
        if self._passed < self._known():
            return True
        if self._joins_at is None:
            self._come_in(feed)
        joins_at = self._joins_at
        assert joins_at is not None, "it is admitted"
        if self._passed < joins_at.newest:
            return True
        self.passing = False
        self.world.follow()
        for schedule, state in zip(self._schedules, joins_at.schedules, strict=True):
            schedule.load_state_dict(state)
        index = joins_at.step % feed.steps * self._each
        feed.book.samples(epoch, 0, 0)  # the sampler's generator comes to where it is on the other ranks
        if not feed.is_over(epoch):
            feed.read_own_from(epoch, index)
        return False

    def _known(self) -> int:
        return self._reports.newest() if self._joins_at is None else self._joins_at.newest

    def _come_in(self, feed: LoopFeed) -> None:
        """Wait for admission, at the place where the others let this rank in."""
        self._feed, feed.trains, self._is_ready = feed, True, True
        self.window.follow(feed)
        self._begin_with_first_loader()
        assert self._joins_at is not None, "the others have reported it"
        feed.book.draws.update(self._joins_at.draws)
        self._rates.update(self._joins_at.rates)
        self._newest = self._joins_at.newest

    def _forward_while_passing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`engine.forward` of a joining rank."""

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.passing or self.window.around is not self:
                return original(*args, **kwargs)
            trains = self._engine.module.training
            if self._found is not None and trains:
                return self._found
            with self.window.replicas.alone(), torch.no_grad():
                found = type(self._engine).forward(self._engine, *args, **kwargs)
            if trains:
                self._found = found
            return found

        return forward

    # ------------------------------------------------ an iteration

    def set_sync(self, original: Callable[[], None]) -> None:
        """`Accelerator._do_sync`: whether the iteration ends a step."""
        original()
        self._accumulates = True
        self._say(self.passing or self._ends_step)

    @property
    def _ends_step(self) -> bool:
        drawn = Loaders.last
        if not isinstance(drawn, LoopFeed):
            return True
        item = drawn.in_hand[-1] if drawn.in_hand else drawn.now
        return item is not None and item.is_last and drawn.is_fresh(item)

    def _say(self, syncs: bool) -> None:
        self.accelerator.gradient_state._set_sync_gradients(syncs)

    def backward(self, original: Callable[[], None]) -> None:
        """`Accelerator.backward`; it takes the step as well."""
        self._is_within = False
        if self.passing:
            self._passed += 1
            self._say(True)
            return
        if self._each > 1 and not self._accumulates and self._feed is not None and self._feed.now is not None:
            self._refuse_without_accumulate()
        before = self.window.step
        self._say(self._ends_step)
        original()
        is_taken, is_new = self.window.step > before, self.window.step > self._newest
        if is_taken and not is_new:
            self._set_rates()
        self._newest = max(self._newest, self.window.step)
        self._say(is_taken and is_new)

    def _refuse_without_accumulate(self) -> None:
        assert self._feed is not None and self._feed.now is not None, "it is asked after a forward"
        if self._feed.is_fresh(self._feed.now):
            raise Refused(
                f"accelerator.backward outside accelerator.accumulate, with gradient_accumulation_steps = {self._each}:"
                " each backward would be a step",
                fix="with accelerator.accumulate(model): ... around the iteration",
            )

    @property
    def _schedules(self) -> list[AcceleratedScheduler]:
        return [one for one in self.accelerator._schedulers if not isinstance(one, DeepSpeedSchedulerWrapper)]

    def _set_rates(self) -> None:
        """Set the learning rates of the script's own schedule, which has not gone back."""
        for schedule in self._schedules:
            for group, rate in zip(self._engine.basic_optimizer.param_groups, schedule.get_last_lr(), strict=True):
                group["lr"] = rate

    # ------------------------------------------------ between two steps

    def section[Result](self, work: Callable[[], Result], alone: Callable[[], Result]) -> Result:
        """Run a collective of the loop through losses, on all ranks at the same place.

        Args:
            work: The collective.
            alone: Returns its result as if all ranks had what this one has; for a rank that joins, or if a loss has
                undone the step.
        """
        if self.passing:
            return alone()
        if self._loop.inside:
            with self.world.present():
                return work()
        self.begin()
        self._calls += 1
        found: list[Result] = []
        try:
            self.window.section(functools.partial(self._attempt, work, found, self._calls), _nothing)
        except WentBack:
            _LOG.warning("a collective of the loop was not run: a loss has undone the step before it")
            return alone()
        return found[-1]

    def _warn_of_missing_ranks(self) -> None:
        """Say once that what is gathered within a step lacks ranks: a loss that is computed from it would differ."""
        if self.window.degraded and self._is_within and not self._has_warned:
            what = f"of {dist.get_world_size()} of {self._nominal} ranks"
            _LOG.warning("what the loop gathers within a step is %s now: a loss that depends on it would differ", what)
            self._has_warned = True

    def _attempt(self, work: Callable[[], Any], found: list[Any], number: int) -> None:
        if number <= self._alone_until:
            raise WentBack
        window = self.window
        if window.copies is not None and self._settled != window.step:
            window.copies.catch_up(window.checkpoints._vote_on_copies)
        self._settled = window.step
        with self.world.present():
            found.append(work())
        self._warn_of_missing_ranks()
        self._loop.vote(_applied, window.no_words())


def _synchronize(loader: Any) -> None:
    from accelerate import data_loader  # noqa: PLC0415  (its function is replaced there)

    data_loader.synchronize_rng_states(loader.rng_types, loader.synchronized_generator)


def _nothing() -> None:
    """Nothing to do."""


def _applied(_: bool) -> None:
    """A collective applies nothing."""
