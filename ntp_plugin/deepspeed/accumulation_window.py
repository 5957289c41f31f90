"""The accumulation window: what is put around the engine's forward, backward and step, and the vote.

A window is the micro-batches of one optimizer step that this rank computes. The engine's own methods run as they are,
and every loss is noticed in one of them. Then the recovery is gone, and where the step in flight is not over everywhere
the window restarts: `_Restarts` unwinds whatever of the engine was under way, and the loop goes on.

The vote stands before the first thing that a step changes: the optimizer's own `step`, or, where the engine skips it
because of an overflow, the end of that step. A loss inside the vote is walked right there, so that a rank that has to
apply the step after all, because others have, returns into the engine and finishes it.
"""

import contextlib
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
from ntp_plugin.errors import PeerLost, Refused
from ntp_plugin.planning.topology import Topology
from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.recovery.job_copies import WORDS, JobCopies
from ntp_plugin.recovery.replica_comparison import ReplicaWatch
from ntp_plugin.recovery.voted_sections import Loop
from ntp_plugin.telemetry import Committed, Teller
from ntp_plugin.training.stream import Stream

_LOG = logging.getLogger(__name__)
_SOMEBODY_ASKS, _COMPARE, _LOSS, _COPIES = range(4)
"""What the numbers of the vote are; the last are as many as there are words of copies."""


class _Restarts(BaseException):
    """Nothing that the engine, or a loop around it, should catch."""


class AccumulationWindow:
    """Around one engine."""

    def __init__(
        self,
        engine: Any,
        policy: TrainingPolicy,
        topology: Topology,
        *,
        rank: ElasticRank,
        loop: Loop,
        teller: Teller,
    ) -> None:
        self._engine, self._policy, self._rank, self._loop, self._teller = engine, policy, rank, loop, teller
        self._topology = topology
        self._replica, self._nominal = topology.slot_of(rank.place.slot).replica, topology.dp
        self._moves_together = topology.tp > 1
        """Whether the slots of a replica wait for each other in the forward."""
        self._each: int = engine.gradient_accumulation_steps()
        self.numbers: Sequence[int] = range(self._replica * self._each, (self._replica + 1) * self._each)
        """Of the micro-batches of a global batch, those that this rank computes."""
        self.seed = 0
        """What masks that do not depend on the rank are drawn from; the same for all."""
        self.step = 0
        """Optimizer steps of this job that are in the state: the window is of the one after them."""
        self.copies: JobCopies | None = None
        """Of shards, where there are any."""
        self.replicas: CutReplicas | FullWidthReplicas
        """Who computes what; until the trainer has it, nobody does."""
        self.begin_job: Callable[[], None] = _nothing
        """What there is to do before the first forward."""
        self.wait_to_be_let_in: Callable[[], None] = _nothing
        """What comes before that; a joining rank does it where the job is, as far as that was told."""
        self.watch: ReplicaWatch | None = None
        """Compares replicas at the state after a step; all ranks come together."""
        self._compare_in = -1
        """The epoch of the last vote in which a rank asked for a comparison after the step."""
        self._followed: Followed | None = None
        self._turns = DataEpochs(rank)
        self._done = 0
        """Micro-batches of the window that have been through the backward."""
        self._stale = self._voted = self._unwinding = self._somebody_asks = False
        self._drawn_anew = False
        """Whether the window begins after a recovery."""
        self._evaluates_alone = rank.place.joining
        """Until the next forward of the training all slots are together in."""
        self._told_of_evaluation = False
        self.votes_on: int | None = None
        """The section whose vote on a step this rank stands in: once that is over it goes on there, whoever is lost."""
        self._in_flight = False
        """Whether the newest forward has not been through the backward."""
        self._loss: torch.Tensor | float = 0.0
        """The sum over micro-batches; a number of the device, which nobody waits for before the vote."""
        self._before: Mapping[str, Any] | None = None
        """What the engine had counted when the window began, if it has."""
        self._drawn_from = drawn_from()
        self._began_at = time.monotonic()
        loop.not_finite = self.compare_what_is_not_finite
        self.checkpoints = EngineCheckpoints(engine, self, rank=rank, loop=loop)
        Loaders.follow = self._follow

    # ------------------------------------------------ who is there

    @property
    def degraded(self) -> bool:
        """Whether somebody is lost."""
        return len(self._rank.groups.members) < self._topology.size

    def _follow(self, loader: Any) -> Stream | None:
        if not can_follow(loader, replica=self._replica, replicas=self._nominal):
            return None
        nominal = range(self._replica * self._each, (self._replica + 1) * self._each)
        return Stream(per_step=self._each, per_turn=len(loader), numbers=nominal)

    def restart(self, step: int, numbers: Sequence[int], counted: Any = None) -> None:
        """From the first micro-batch of the step after `step` on; in a recovery."""
        self._unwinding = self._stale = self._drawn_anew = self._evaluates_alone = True
        has_drawn = self._before is not None or step < self.step  # else the window has not begun
        self.step, self.numbers = step, numbers
        self._done, self._loss = 0, 0.0
        adopt(self._engine, counted or self.counted())
        self._before = None
        if has_drawn:
            draw_from(self._drawn_from)
        if self._followed is not None:
            self._followed.stream.restart(step, numbers)

    def go_on(self, numbers: Sequence[int]) -> None:
        """The step in flight is over, and was applied in the recovery: the next one is of another share."""
        self.numbers = numbers
        self._drawn_anew = self._evaluates_alone = True

    def counted(self) -> Mapping[str, Any]:
        """What the engine had counted when the window began, or has, if it has not."""
        return self._before or count(self._engine)

    # ------------------------------------------------ the engine's methods

    def into(self, engine: Any) -> None:
        """Put them in place, on this engine alone."""
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
            if self._moves_together:
                return self._together_forward(work, trains=trains)
            with self.replicas.alone() if self._is_not_in_yet else contextlib.nullcontext():
                return work()

        return forward

    def _together_forward(self, work: Callable[[], Any], *, trains: bool) -> Any:
        """Of all slots of a replica. Who is interrupted goes to its end alone: the loop is owed something, and what
        comes of it in the training is stale. An evaluation cannot be taken up again after a recovery, wherever each
        slot was in it or how far before: they are together again in the next forward of the training."""
        if trains:
            self._evaluates_alone = self._told_of_evaluation = False
        if not (self._stale if trains else self._evaluates_alone):
            told = self._through(work)
            if told is not None:
                return told[0]
        with self.replicas.alone():
            found = work()
        if trains:
            return found
        if not self._told_of_evaluation:
            _LOG.warning("a loss, or a return, has interrupted an evaluation: what is left of it gives NaN")
        self._told_of_evaluation = True
        return without_numbers(found)

    @property
    def _is_not_in_yet(self) -> bool:
        """Whether this process comes in, and nothing that it has made is connected."""
        return self._rank.place.joining and self.begin_job is not _nothing

    def begin(self) -> None:
        """What there is to do before anything is done together."""
        comes_in = self._is_not_in_yet
        self._wait_to_be_let_in()
        begin, self.begin_job = self.begin_job, _nothing
        begin()
        if comes_in and self._followed is not None:
            refuse_to_come_too_late(self._followed, self.step)
        if self._unwinding:  # it came in
            self._unwound()

    def _take_in_hand(self) -> None:
        if self._goes_past_turns():
            return
        self.begin()
        self._adopt_loader()
        if self._in_flight and self._has_none_in_hand:  # a second forward for one backward
            return
        self._through(self._between_windows if not self._done else _nothing)
        assert self._followed is not None, "there is a loader that was drawn from"
        fresh = self._followed.hand_over()
        if fresh is None:
            raise Refused(
                "the engine went forward with a batch that no followed loader has yielded",
                way_out="draw one micro-batch from the loader for each forward",
            )
        self._stale, self._in_flight = not fresh, True
        self.checkpoints.catches_up &= self._stale
        if not self._stale and not self._done:
            self._begin()
        if not self._stale and self.degraded:
            self._engine.set_gradient_accumulation_boundary(self._is_last)
        if self._policy.dropout == "exact" and not self._stale:
            torch.manual_seed(_seed_of(self.seed, self.step, self.numbers[self._done]))

    def _between_windows(self) -> None:
        self._compare_if_voted()
        self._open_the_door()

    def _compare_if_voted(self) -> None:
        """All who left the vote in this epoch know it alike, and nobody joins without a new one; where a step was
        applied in a recovery, the comparison is after the next step."""
        if self.watch is not None:
            wanted = self._compare_in == self._rank.groups.epoch
            self.watch.compare_if(wanted, self._engine.global_steps)

    def compare(self) -> None:
        """Before the state is written, or the job ends; all ranks come together."""
        if self.watch is not None:
            self.watch.before_it_counts(self._engine.global_steps)

    def compare_what_is_not_finite(self) -> None:
        """In a vote whose numbers are not finite; all ranks come together."""
        if self.watch is not None:
            self.watch.not_finite(self._steps_before)

    @property
    def _steps_before(self) -> int:
        """The engine's steps before the window: one that it skips is counted before the vote."""
        return int(self.counted()["counters"]["global_steps"])

    def _wait_to_be_let_in(self) -> None:
        wait, self.wait_to_be_let_in = self.wait_to_be_let_in, _nothing
        wait()

    def _goes_past_turns(self) -> bool:
        """As a joining rank, before it comes in."""
        if not self._is_not_in_yet:
            return False
        self._adopt_loader()
        assert self._followed is not None, "it is adopted"
        if not self._turns.gone_past(self._followed, self.numbers, self._wait_to_be_let_in):
            return False
        self._stale = self._in_flight = True
        return True

    def _adopt_loader(self) -> None:
        if self._followed is None:
            if Loaders.last is None:
                raise Refused(
                    "the engine trains on batches of a loader that nobody can go back in",
                    way_out="use the one that deepspeed.initialize(training_data=...) returns, or a DataLoader with a"
                    " DistributedSampler of all ranks",
                )
            self._followed, Loaders.last.trains = Loaders.last, True
            if self.step or self.degraded:  # of a checkpoint, or of the others where this process comes in
                self._followed.stream.restart(self.step, self.numbers)
        elif Loaders.last is not self._followed and Loaders.last is not None and Loaders.last.trains:
            raise Refused("the engine trains on two loaders", way_out="use one for training")

    @property
    def _has_none_in_hand(self) -> bool:
        return self._followed is not None and not self._followed.in_hand

    @property
    def _is_last(self) -> bool:
        return self._done == len(self.numbers) - 1

    def _open_the_door(self) -> None:
        if self._somebody_asks:
            self._somebody_asks = False
            self._tell_of_turn()
            if self._rank.doorkeeper.open(mine=dist.get_rank() == 0):
                raise PeerLost("a joining rank comes in")

    def _tell_of_turn(self) -> None:
        assert self._followed is not None, "it was drawn from"
        self._turns.begun(self._followed.stream.turn_of(self.step))

    def _begin(self) -> None:
        self._before, self._drawn_from = count(self._engine), drawn_from()
        self._began_at, self._voted = time.monotonic(), False
        self._tell_of_turn()
        if self.copies is not None:
            self.copies.begin()
        if self.degraded:
            self._coalesce(begin=True)
        if self._drawn_anew and self._moves_together:  # all slots of a replica draw alike
            torch.manual_seed(_seed_of(self.seed, self.step, self._nominal * self._each + self._replica))
        self._drawn_anew = False

    def _coalesce(self, *, begin: bool) -> None:
        """ZeRO's reduction, once at the end of the window, as `engine.coalesce_grad_reduction` has it."""
        optimizer = self._engine.optimizer
        if not hasattr(optimizer, "_coalesce_grad_reduction"):
            return
        optimizer._coalesce_grad_reduction = self._engine.inside_no_sync_ctxt = begin

    def _backward(self, original: Any) -> Any:
        @functools.wraps(original)
        def backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
            self._in_flight = False
            if self._stale:
                return loss / self._each
            degraded, weight = self.degraded, self.replicas.weight
            work = functools.partial(original, loss * weight if degraded else loss, *args, **kwargs)
            told = self._through(work)
            if told is None:
                return loss / self._each
            self._done += 1
            self._loss = self._loss + loss.detach()
            return told[0] / weight if degraded else told[0]

        return backward

    def _step(self, original: Any) -> Any:
        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            if self._in_flight:
                raise Refused("engine.step() without engine.backward(loss)", way_out="not loss.backward(): this one")
            if self._stale:
                return None
            if self._done < len(self.numbers):
                if self.degraded:
                    self._engine.micro_steps += 1
                    return None
                told = self._through(functools.partial(original, *args, **kwargs))
                return None if told is None else told[0]
            told = self._through(functools.partial(self._take, original, *args, **kwargs))
            if told is None:
                return None
            self._commit()
            return told[0]

        return step

    def _take(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self.degraded:
            self._reduce()
        result = original(*args, **kwargs)
        if not self._voted:  # the engine has skipped the step
            self._vote(_nothing)
        return result

    def _reduce(self) -> None:
        self._coalesce(begin=False)
        optimizer = self._engine.optimizer
        if hasattr(optimizer, "_coalesce_grad_reduction"):
            self._engine.set_gradient_accumulation_boundary(True)
            self._engine._flush_coalesced_reduction_zero12(optimizer)

    def _commit(self) -> None:
        self.step += 1
        self.checkpoints.committed(self.step)
        self._engine.micro_steps = self.counted()["counters"]["micro_steps"] + self._each
        self._engine._is_gradient_accumulation_boundary = None
        self._before = None
        if self._teller.is_heard:
            self._teller.tell(
                Committed(
                    step=self._engine.global_steps,
                    epoch=self._loop.voted_in,
                    seconds=time.monotonic() - self._began_at,
                    losses={"loss": float(self._loop.outcome[_LOSS]) / (self._nominal * self._each)},
                    samples=list(self.numbers) if self.replicas.is_replica_leader else [],
                )
            )
        self._done, self._loss = 0, 0.0
        assert self._followed is not None, "it was drawn from"
        stream = self._followed.stream
        if tuple(stream.numbers) != tuple(self.numbers):
            stream.restart(self.step, self.numbers)

    @property
    def loop_is_where_the_job_is(self) -> bool:
        """Not between turns that are over, where the script goes through them."""
        return self._followed is not None and self._followed.is_where_the_stream_is

    def section[Result](self, work: Callable[[], Result], told: Callable[[], Result]) -> Result:
        """One that is no step of the training."""
        try:
            return self._loop.section(work, told)
        finally:
            if self._unwinding:
                self._unwound()

    def end(self) -> None:
        """The script is over."""
        self.begin()
        self.checkpoints.refuse_to_end()

    # ------------------------------------------------ through losses

    def _through[Result](self, work: Callable[[], Result]) -> tuple[Result] | None:
        """None where the window has restarted meanwhile."""
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

        return self._loop.driver.carry_through(attempt)

    def _unwound(self) -> None:
        """Nothing of the engine is under way any more: no part of a step is left over."""
        engine = self._engine
        engine._running_engine_backward, engine._running_engine_backward_count = False, 0
        engine._running_engine_step = engine.inside_no_sync_ctxt = False
        engine._is_gradient_accumulation_boundary = None
        for timer in engine.timers.get_timers().values():
            timer.started_ = False
        stepped = (parameter for group in engine.basic_optimizer.param_groups for parameter in group["params"])
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
            return self._loop.driver.carry_through(attempt)
        finally:
            self.votes_on = None

    def no_words(self) -> torch.Tensor:
        """For a vote that only waits for all."""
        return torch.zeros(_COPIES + WORDS, dtype=torch.float64)

    def are_of_all(self, numbers: torch.Tensor) -> list[bool]:
        """Which words all have said."""
        members = dist.get_world_size()
        return [int(number) == members for number in numbers]

    def _words(self) -> torch.Tensor:
        numbers = self.no_words()
        numbers[_LOSS] = float(self._loss) if self.replicas.is_replica_leader else 0.0
        if dist.get_rank() == 0 and self._rank.doorkeeper.somebody_asks():
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
    """One for each micro-batch of the job, of 63 bits."""
    told = hashlib.blake2b(f"{seed} {step} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(told) >> 1


def _nothing() -> None:
    """There is nothing to do."""
