"""Wraps the engine's forward, backward and step with the accumulation window, and holds the vote on each step.

An accumulation window is the set of micro-batches of one optimizer step that this rank computes. The engine's own
methods run unchanged, and one of them notices every loss. Then the recovery runs. If the step in flight is not over on
all ranks, the accumulation window restarts: `_Restarts` unwinds whatever the engine was doing, and the loop goes on.

The vote comes before the first thing that a step changes: the optimizer's own `step`, or, if the engine skips it
because of an overflow, the end of that step. A loss inside the vote is recovered right there. So a rank that has to
apply the step after all, because others have, returns into the engine and finishes it.
"""

import functools
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ntp_plugin.config.sections import TrainingPolicy
from ntp_plugin.deepspeed.autotp_layers import without_numbers
from ntp_plugin.deepspeed.autotp_replicas import CutReplicas
from ntp_plugin.deepspeed.checkpoints import EngineCheckpoints
from ntp_plugin.deepspeed.data_epochs import DataEpochs, refuse_to_come_too_late
from ntp_plugin.deepspeed.engine_counters import adopt, count, draw_from, drawn_from
from ntp_plugin.deepspeed.full_width_replicas import FullWidthReplicas
from ntp_plugin.deepspeed.loaders import Followed, Loaders, can_follow
from ntp_plugin.deepspeed.unsupported import CALLS, refuse_call, refuse_load
from ntp_plugin.deepspeed.whose_loop import UserDraws
from ntp_plugin.errors import PeerLost, Refused
from ntp_plugin.planning.topology import Topology
from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.recovery.job_copies import WORDS, JobCopies
from ntp_plugin.recovery.replica_comparison import ReplicaWatch
from ntp_plugin.recovery.voted_sections import Loop
from ntp_plugin.telemetry import Committed, EventWriter
from ntp_plugin.training.stream import Stream

_LOG = logging.getLogger(__name__)
_SOMEBODY_ASKS, _COMPARE, _LOSS, _COUNTED, _COPIES = range(5)
"""Positions in the vector that the vote sums; the last part has one number per value of the copies."""


class _Restarts(BaseException):
    """Unwinds the engine to the plugin; nothing in between should catch it."""


class AccumulationWindow:
    """The accumulation window of one engine."""

    def __init__(
        self,
        engine: Any,
        policy: TrainingPolicy,
        topology: Topology,
        *,
        rank: ElasticRank,
        loop: Loop,
        event_writer: EventWriter,
    ) -> None:
        self._engine, self._policy, self._rank, self._loop, self._event_writer = (
            engine,
            policy,
            rank,
            loop,
            event_writer,
        )
        self._topology = topology
        self._replica, self._nominal = topology.slot_of(rank.place.slot).replica, topology.dp
        self.gathers_weights = int(engine.zero_optimization_stage()) > 2
        """Whether all ranks take part in every forward (ZeRO-3)."""
        self._each: int = engine.gradient_accumulation_steps()
        self.numbers: Sequence[int] = range(self._replica * self._each, (self._replica + 1) * self._each)
        """This rank's micro-batches in the global batch, by number; a repeated one counts for nothing."""
        self._order: Sequence[int] = self.numbers
        """The same for this step, in the order of drawing."""
        self.around = UserDraws(self._each)
        """The loop around the window."""
        self.seed = 0
        """The seed of masks that do not depend on the rank; the same on all ranks."""
        self.step = 0
        """Optimizer steps of this job that are in the state; the accumulation window belongs to the next one."""
        self.copies: JobCopies | None = None
        """The copies of shards, if the job makes them."""
        self.replicas: CutReplicas | FullWidthReplicas
        """Who computes what; set by the trainer."""
        self.begin_job: Callable[[], None] = _nothing
        """Callback run before the first forward."""
        self.wait_for_admission: Callable[[], None] = _nothing
        """Callback run before `begin_job`. A joining rank runs it when its loop has reached the newest reported data
        epoch."""
        self.watch: ReplicaWatch | None = None
        """Compares replicas after a committed step; all ranks take part."""
        self._compare_in = -1
        """The epoch of the last vote in which a rank asked for a comparison after the step."""
        self._followed: Followed | None = None
        self._data_epochs = DataEpochs(rank)
        self._done = 0
        """Micro-batches of the accumulation window whose backward is done."""
        self._stale = self._voted = self._unwinding = self._somebody_asks = self._warned_of_evaluation = False
        self._drawn_anew = False
        """Whether the accumulation window begins after a recovery."""
        self._evaluates_alone = rank.place.joining
        """Whether evaluations run without the other slots, until all slots meet in the next training forward."""
        self.votes_on: int | None = None
        """The section whose step vote this rank is in. Once that section is over, this rank continues from there,
        whoever is lost."""
        self._in_flight = False
        """Whether the newest forward still lacks its backward."""
        self._loss: torch.Tensor | float = 0.0
        """The sum over micro-batches; a device tensor, which nobody waits for before the vote."""
        self._before: Mapping[str, Any] | None = None
        """The engine counters when the accumulation window began; None if it has not begun."""
        self._drawn_from = drawn_from()
        self._began_at = time.monotonic()
        loop.not_finite = self.compare_what_is_not_finite
        self.checkpoints = EngineCheckpoints(engine, self, rank=rank, loop=loop)
        Loaders.follow = self._follow

    # ------------------------------------------------ membership

    @property
    def degraded(self) -> bool:
        """Whether any rank is lost."""
        return len(self._rank.groups.members) < self._topology.size

    @property
    def _moves_together(self) -> bool:
        """Whether slots wait for each other in the forward: those of a replica, and with ZeRO-3 all."""
        return self._topology.tp > 1 or self.gathers_weights

    def _follow(self, loader: Any) -> Stream | None:
        if not can_follow(loader, replica=self._replica, replicas=self._nominal):
            return None
        nominal = range(self._replica * self._each, (self._replica + 1) * self._each)
        return Stream(per_step=self._each, per_data_epoch=len(loader), numbers=nominal)

    def restart(self, step: int, numbers: Sequence[int], counted: Any = None) -> None:
        """Restart, in a recovery, from the first micro-batch of the step after `step`."""
        self._unwinding = self._stale = self._drawn_anew = self._evaluates_alone = True
        has_drawn = self._before is not None or step < self.step  # else the accumulation window has not begun
        self.step, self.numbers = step, numbers
        self._done, self._loss = 0, 0.0
        adopt(self._engine, counted or self.counted())
        self._before = None
        if has_drawn:
            draw_from(self._drawn_from)
        if self._followed is not None:
            self._followed.stream.restart(step, numbers)

    @property
    def is_stale(self) -> bool:
        """Whether the micro-batch in hand counts for nothing, since a recovery has come after it was drawn."""
        return self._stale

    @property
    def share(self) -> Sequence[int]:
        """This rank's micro-batches in the step of the accumulation window."""
        return self.around.share(self.step, self.numbers)

    @property
    def done(self) -> int:
        """How many of them are through their backward."""
        return self._done

    def loss_of_all(self) -> float:
        """Return the sum of the losses of all ranks in the step that was voted on last."""
        return float(self._loop.outcome[_LOSS])

    def counted_by_all(self) -> float:
        """Return what all ranks have counted in the step that was voted on last (`UserDraws.counted_here`)."""
        return float(self._loop.outcome[_COUNTED])

    def follow(self, followed: Any) -> None:
        """Draw from this loader, which a framework's loop has, instead of the one that was drawn from last."""
        self._followed = Loaders.last = followed

    def go_on(self, numbers: Sequence[int]) -> None:
        """Take a new share for the next step; the step in flight was applied in the recovery."""
        self.numbers = numbers
        self._drawn_anew = self._evaluates_alone = True

    def counted(self) -> Mapping[str, Any]:
        """Return the engine counters when the accumulation window began, or the current ones if it has not."""
        return self._before or count(self._engine)

    # ------------------------------------------------ the engine's methods

    def into(self, engine: Any) -> None:
        """Install the wrappers on this engine alone."""
        engine.forward = self._forward(engine.forward)
        engine.backward = self._backward(engine.backward)
        engine.step = self._step(engine.step)
        if isinstance(self.replicas, CutReplicas):
            engine.load_checkpoint = refuse_load(
                engine.load_checkpoint, degraded=lambda: self.begin_job is _nothing and self.degraded
            )
        self.checkpoints.into(engine)
        for name in CALLS:
            setattr(engine, name, refuse_call(name))
        optimizer = engine.basic_optimizer
        optimizer.step = self._vote_and_apply(optimizer.step)

    def _forward(self, original: Any) -> Any:
        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            work = functools.partial(original, *args, **kwargs)
            trains = self._engine.module.training and torch.is_grad_enabled()
            if trains:
                self._take_in_hand()
            else:
                Loaders.evaluate()
                if self._loop.inside:  # the section runs again after a loss
                    return work()
            if self._moves_together:
                return self._together_forward(work, trains=trains)
            if not self._is_not_in_yet:
                return work()
            with self.replicas.alone():
                found = work()
            return found if trains else self._not_a_number(found)

        return forward

    def _together_forward(self, work: Callable[[], Any], *, trains: bool) -> Any:
        """Run a forward that all slots of a replica take part in. A slot that a loss interrupts finishes it alone,
        because the loop needs an output; in training that output is stale. An evaluation cannot be resumed after a
        recovery, since the slots may be at different points of it: they meet again in the next training forward."""
        if trains:
            self._evaluates_alone = self._warned_of_evaluation = False
        if not (self._stale if trains else self._evaluates_alone):
            result = self._through(work)
            if result is not None:
                return result[0]
        with self.replicas.alone():
            found = work()
        return found if trains else self._not_a_number(found)

    def _not_a_number(self, found: Any) -> Any:
        """Return an evaluation's output without its numbers: a part of it is missing, or its weights are."""
        if not self._warned_of_evaluation:
            _LOG.warning(
                "this process has not joined the job yet: what it evaluates gives NaN"
                if self._is_not_in_yet
                else "a loss, or a return, has interrupted an evaluation: the rest of it gives NaN"
            )
        self._warned_of_evaluation = True
        return without_numbers(found)

    @property
    def _is_not_in_yet(self) -> bool:
        """Whether this process is joining and not yet admitted."""
        return self._rank.place.joining and self.begin_job is not _nothing

    def begin(self) -> None:
        """Do what must come before the first collective: admission, and the start of the job."""
        comes_in = self._is_not_in_yet
        self._wait_for_admission()
        begin, self.begin_job = self.begin_job, _nothing
        begin()
        if comes_in and self._followed is not None:
            refuse_to_come_too_late(self._followed, self.step)
        if self._unwinding:  # it has joined
            self._unwound()

    def _take_in_hand(self) -> None:
        if self._skips_data_epoch():
            return
        self.begin()
        self._adopt_loader()
        if self._in_flight and self._has_none_in_hand:  # a second forward for one backward
            return
        self._through(self._between_windows if not self._done else _nothing)
        assert self._followed is not None, "a loader was drawn from"
        fresh = self._followed.hand_over()
        if fresh is None:
            raise Refused(
                "the engine went forward with a batch that no followed loader has yielded",
                fix="draw one micro-batch from the loader for each forward",
            )
        self._stale, self._in_flight = not fresh, True
        self.checkpoints.catches_up &= self._stale
        if not self._stale and not self._done:
            self._begin()
        if not self._stale and self.degraded:
            self._engine.set_gradient_accumulation_boundary(self._is_last)
        if self._policy.dropout == "exact" and not self._stale:
            torch.manual_seed(_seed_of(self.seed, self.step, self._order[self._done]))

    def _between_windows(self) -> None:
        self._compare_if_voted()
        self._open_admission()

    def _compare_if_voted(self) -> None:
        """All ranks that left the vote in this epoch know the outcome, and nobody joins without a new epoch. If a step
        was applied in a recovery, the comparison follows the next step."""
        if self.watch is not None:
            wanted = self._compare_in == self._rank.groups.epoch
            self.watch.compare_if(wanted, self._engine.global_steps)

    def compare(self) -> None:
        """Compare replicas before the state is written, or the job ends; all ranks take part."""
        if self.watch is not None:
            self.watch.before_it_counts(self._engine.global_steps)

    def compare_what_is_not_finite(self) -> None:
        """Compare replicas when a vote has a non-finite number; all ranks take part."""
        if self.watch is not None:
            self.watch.not_finite(self._steps_before)

    @property
    def _steps_before(self) -> int:
        """The engine's step count before the accumulation window: a skipped step is counted before the vote."""
        return int(self.counted()["counters"]["global_steps"])

    def _wait_for_admission(self) -> None:
        wait, self.wait_for_admission = self.wait_for_admission, _nothing
        wait()

    def _skips_data_epoch(self) -> bool:
        """Whether a joining rank, before it is admitted, skips the rest of an old data epoch."""
        if not self._is_not_in_yet:
            return False
        self._adopt_loader()
        assert self._followed is not None, "it is adopted"
        if not self._data_epochs.skip_if_behind(self._followed, self.numbers, self._wait_for_admission):
            return False
        self._stale = self._in_flight = True
        return True

    def _adopt_loader(self) -> None:
        if self._followed is None:
            if Loaders.last is None:
                raise self.around.unfollowed()
            self._followed, Loaders.last.trains = Loaders.last, True
            if self.step or self.degraded:  # from a checkpoint, or from the other ranks when this process joins
                self._followed.stream.restart(self.step, self.numbers)
        elif Loaders.last is not self._followed and Loaders.last is not None and Loaders.last.trains:
            raise Refused("the engine trains on two loaders", fix="use one for training")

    @property
    def _has_none_in_hand(self) -> bool:
        return self._followed is not None and not self._followed.in_hand

    @property
    def repeats(self) -> bool:
        """Whether the micro-batch in hand repeats the one before, so that it counts for nothing."""
        return self._done > 0 and self._order[self._done] == self._order[self._done - 1]

    @property
    def _is_last(self) -> bool:
        return self._done == len(self.share) - 1

    def meet(self) -> None:
        """Let joining ranks in, if any ask; for a framework's loop, all ranks of which are between two steps."""
        self._through(self._open_admission)

    def _open_admission(self) -> None:
        if self._somebody_asks and self.around.may_admit():
            self._somebody_asks = False
            self._report_data_epoch()
            if self._rank.admission_control.open(mine=dist.get_rank() == 0):
                raise PeerLost("a joining rank is admitted")

    def _report_data_epoch(self) -> None:
        assert self._followed is not None, "it was drawn from"
        self._data_epochs.report(self._followed.stream.data_epoch_of(self.step))

    def _begin(self) -> None:
        self._before, self._drawn_from = count(self._engine), drawn_from()
        self._began_at, self._voted = time.monotonic(), False
        assert self._followed is not None, "it was drawn from"
        self._order = self.around.order(self._followed, self.step, self.share)
        self._report_data_epoch()
        if self.copies is not None:
            self.copies.begin()
        if self.degraded:
            self._coalesce(begin=True)
        if self._drawn_anew and self._topology.tp > 1:  # all slots of a replica draw alike
            torch.manual_seed(_seed_of(self.seed, self.step, self._nominal * self._each + self._replica))
        self._drawn_anew = False

    def _coalesce(self, *, begin: bool) -> None:
        """Have ZeRO reduce once, at the end of the accumulation window, as `engine.coalesce_grad_reduction` does. With
        ZeRO-3 all ranks go backward equally often."""
        optimizer = self._engine.optimizer
        if self.gathers_weights or not hasattr(optimizer, "_coalesce_grad_reduction"):
            return
        optimizer._coalesce_grad_reduction = self._engine.inside_no_sync_ctxt = begin

    def _backward(self, original: Any) -> Any:
        @functools.wraps(original)
        def backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
            self._in_flight = False
            if self._stale:
                return loss / self._each
            degraded, weight = self.degraded, self.replicas.weight
            repeats = degraded and self.repeats
            weighed = loss * (0.0 if repeats else weight) if degraded else loss
            result = self._through(functools.partial(original, weighed, *args, **kwargs))
            if result is None:
                return loss / self._each
            self._done += 1
            if repeats:
                return loss / self._each
            self._loss = self._loss + loss.detach()
            return result[0] / weight if degraded else result[0]

        return backward

    def _step(self, original: Any) -> Any:
        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            if self._in_flight:
                raise Refused(
                    "engine.step() without engine.backward(loss)",
                    fix="call engine.backward(loss), not loss.backward()",
                )
            if self._stale:
                return None
            if self._done < len(self.share):
                if self.degraded:
                    self._engine.micro_steps += 1
                    return None
                result = self._through(functools.partial(original, *args, **kwargs))
                return None if result is None else result[0]
            result = self._through(functools.partial(self._take, original, *args, **kwargs))
            if result is None:
                return None
            self._commit()
            return result[0]

        return step

    def _take(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self.degraded:
            self._reduce()
        result = original(*args, **kwargs)
        if not self._voted:  # the engine has skipped the step
            self._vote(_nothing)
        return result

    def _reduce(self) -> None:
        if self.gathers_weights:
            return
        self._coalesce(begin=False)
        optimizer = self._engine.optimizer
        if hasattr(optimizer, "_coalesce_grad_reduction"):
            self._engine.set_gradient_accumulation_boundary(True)
            self._engine._flush_coalesced_reduction_zero12(optimizer)

    def _commit(self) -> None:
        share, self.step = self.share, self.step + 1
        self.checkpoints.committed(self.step)
        self._engine.micro_steps = self.counted()["counters"]["micro_steps"] + self.around.micro_steps
        self._engine._is_gradient_accumulation_boundary = None
        self._before = None
        if self._event_writer.is_recording:
            self._event_writer.write(
                Committed(
                    step=self._engine.global_steps,
                    epoch=self._loop.voted_in,
                    seconds=time.monotonic() - self._began_at,
                    losses={
                        "loss": float(self._loop.outcome[_LOSS]) / self.around.losses_in(self._nominal * self._each)
                    },
                    samples=list(dict.fromkeys(share)) if self.replicas.is_replica_leader else [],
                )
            )
        self._done, self._loss = 0, 0.0
        assert self._followed is not None, "it was drawn from"
        stream = self._followed.stream
        if tuple(stream.numbers) != tuple(self.numbers):
            stream.restart(self.step, self.numbers)

    @property
    def loop_is_where_the_job_is(self) -> bool:
        """False while the script runs through data epochs that are over."""
        return self._followed is not None and self._followed.is_where_the_stream_is

    def section[Result](self, work: Callable[[], Result], report: Callable[[], Result]) -> Result:
        """Run a section that is not a training step."""
        try:
            return self._loop.section(work, report)
        finally:
            if self._unwinding:
                self._unwound()

    def end(self) -> None:
        """End the window when the script is over."""
        self.begin()
        self.checkpoints.refuse_to_end()

    # ------------------------------------------------ through losses

    def through[Result](self, work: Callable[[], Result]) -> tuple[Result] | None:
        """Run a framework's work on a micro-batch, which may hold collectives of its own, through losses; None if the
        accumulation window has restarted."""
        return self._through(work)

    def _through[Result](self, work: Callable[[], Result]) -> tuple[Result] | None:
        """Run `work` through losses; None if the accumulation window has restarted."""
        try:
            return (self._attempt(work),)
        except _Restarts:
            self._unwound()
            return None

    def _attempt[Result](self, work: Callable[[], Result]) -> Result:
        assert self._loop.driver is not None, "the job is driven"

        def attempt() -> Result:
            if self._unwinding:  # a recovery may come before the first attempt as well
                raise _Restarts
            return work()

        return self._loop.driver.run_with_recovery(attempt)

    def _unwound(self) -> None:
        """Reset the engine after an interrupted call, so that no part of a step remains."""
        engine = self._engine
        engine._running_engine_backward, engine._running_engine_backward_count = False, 0
        engine._running_engine_step = engine.inside_no_sync_ctxt = False
        engine._is_gradient_accumulation_boundary = None
        for timer in engine.timers.get_timers().values():
            timer.started_ = False
        groups = [] if engine.zero_optimization_stage() else engine.basic_optimizer.param_groups  # ZeRO is built again
        stepped = (parameter for group in groups for parameter in group["params"])
        for parameter in (*engine.module.parameters(), *stepped):  # a fused optimizer's `zero_grad` may keep gradients
            parameter.grad = None
        self._unwinding = False

    def _vote_and_apply(self, original: Any) -> Any:
        """`step` of the optimizer that the engine wraps; ZeRO calls it for each group of parameters."""

        @functools.wraps(original)
        def apply(*args: Any, **kwargs: Any) -> Any:
            work = functools.partial(original, *args, **kwargs)
            return work() if self._voted else self._vote(work)

        return apply

    def _vote(self, work: Callable[[], Any]) -> Any:
        self._voted = True
        number, numbers = self._loop.done + 1, self._words()
        assert self._loop.driver is not None, "the job is driven"
        first = True

        def attempt() -> Any:
            nonlocal first
            if self._unwinding:
                raise _Restarts
            if first:
                first = False
                return self._loop.vote(functools.partial(self._heard, work), numbers)
            assert self._loop.done == number, "the step was applied in the recovery"
            return None

        self.votes_on = number
        try:
            return self._loop.driver.run_with_recovery(attempt)
        finally:
            self.votes_on = None

    def no_words(self) -> torch.Tensor:
        """Return the numbers of a vote that only waits for all ranks."""
        return torch.zeros(_COPIES + WORDS, dtype=torch.float64)

    def are_of_all(self, numbers: torch.Tensor) -> list[bool]:
        """Return, for each number, whether all ranks have reported it."""
        members = dist.get_world_size()
        return [int(number) == members for number in numbers]

    def _words(self) -> torch.Tensor:
        numbers = self.no_words()
        numbers[_LOSS] = float(self._loss) if self.replicas.is_replica_leader else 0.0
        numbers[_COUNTED] = self.around.counted_here()
        if dist.get_rank() == 0 and self._rank.admission_control.is_requested():
            numbers[_SOMEBODY_ASKS] = 1
        if self.watch is not None and self.watch.is_due(self._steps_before + 1):
            numbers[_COMPARE] = 1
        if self.copies is not None:
            numbers[_COPIES:] = torch.tensor(self.copies.words(), dtype=torch.float64)
        return numbers

    def _heard(self, work: Callable[[], Any], really: bool) -> Any:
        outcome = self._loop.outcome
        self._somebody_asks = bool(outcome[_SOMEBODY_ASKS])
        self._compare_in = self._loop.voted_in if outcome[_COMPARE] else -1
        if not really:
            return None
        if self.copies is None:
            return work()
        self.copies.heard(self.are_of_all(outcome[_COPIES:]))
        result = self.copies.stepped(work)
        self.copies.steps += 1
        return result


def _seed_of(seed: int, step: int, number: int) -> int:
    """Return a 63-bit seed for one micro-batch of the job."""
    digest = hashlib.blake2b(f"{seed} {step} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def _nothing() -> None:
    """Nothing to do."""
