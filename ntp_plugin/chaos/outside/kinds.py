"""The kinds of faults: which signals go to whom, and what may follow. PURE.

A kind is a list of acts in time, each a signal to somebody. `victim` and `other` are ranks drawn at random, `joiner` is
the process that takes the victim's place, `supervisor` is the `ntp run` process.

Kinds that send SIGUSR1, SIGUSR2 or a real-time signal need a script that has handlers for them
(`ntp_plugin.testing.signal_handlers`), as a user's own script may have.
"""

import dataclasses
import signal
from collections.abc import Mapping

from ntp_plugin.errors import BelowMinimum, RestartIsBetter, ScriptError, StateLost
from ntp_plugin.membership.failure_detector import Thresholds

VICTIM, OTHER, JOINER, SUPERVISOR = "victim", "other", "joiner", "supervisor"
RANKS = frozenset({VICTIM, OTHER, JOINER})
HANGS, RAISES = int(signal.SIGUSR1), int(signal.SIGUSR2)
EXITS, HOLDS_LOCK = signal.SIGRTMIN + 1, signal.SIGRTMIN + 2
BY_HANDLER = frozenset({HANGS, RAISES, EXITS, HOLDS_LOCK})
"""What the handlers of `testing/signal_handlers.py` are for."""
STATE_IS_LOST = frozenset(error.exit_code for error in (BelowMinimum, StateLost, RestartIsBetter))
"""A job may end with one of these where two ranks are lost at once that only together could have saved it."""
_SUPERVISOR_STOPS_S = 6.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Act:
    """One signal."""

    number: int
    whom: str = VICTIM
    after: tuple[float, float] = (0.0, 0.0)
    """Seconds since the act before; drawn from this range. For a joiner: since its process is there."""
    once_it_waits: bool = False
    """Only when its main thread has been idle for some time, because it waits in a collective."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FaultKind:
    """One kind of fault."""

    name: str
    text: str
    acts: tuple[Act, ...]
    loses: tuple[str, ...] = (VICTIM,)
    """Whose loss has to be noticed."""
    ends_job: bool = False
    """The job has to end, within seconds."""
    end_code: int | None = None
    """With this code, where it ends by this."""
    may_end_job: bool = False
    """The job may end by this: the script's own error."""

    @property
    def needs_handlers(self) -> bool:
        """Whether the script must have handlers for its signals."""
        return any(act.number in BY_HANDLER for act in self.acts)

    @property
    def takes_two(self) -> bool:
        """Whether two ranks are lost at about the same time."""
        return {VICTIM, OTHER} <= {*self.loses}


def kinds(thresholds: Thresholds) -> Mapping[str, FaultKind]:
    """All of them, by name; a pause is short or long compared with what the job takes for a stopped rank."""
    return {kind.name: kind for kind in (*_of_a_rank(thresholds), *_of_two(thresholds), *_of_the_supervisor())}


def held_at_most_s(thresholds: Thresholds) -> float:
    """For how long a rank can be stopped and is still taken for alive."""
    return 0.6 * thresholds.frozen_s


def _of_a_rank(thresholds: Thresholds) -> tuple[FaultKind, ...]:
    short, frozen = held_at_most_s(thresholds), thresholds.frozen_s
    stop, go_on = Act(number=signal.SIGSTOP), signal.SIGCONT
    return (
        FaultKind(name="kill", text="SIGKILL to a rank", acts=(Act(number=signal.SIGKILL),)),
        FaultKind(name="stop", text="SIGSTOP to a rank, for ever", acts=(stop,)),
        FaultKind(
            name="stop-short",
            text="SIGSTOP to a rank, SIGCONT before it counts as frozen",
            acts=(stop, Act(number=go_on, after=(0.1 * short, short))),
            loses=(),
        ),
        FaultKind(
            name="stop-long",
            text="SIGSTOP to a rank, SIGCONT some time after it counts as frozen",
            acts=(stop, Act(number=go_on, after=(2 * frozen, 4 * frozen + 2.0))),
        ),
        FaultKind(name="segv", text="SIGSEGV to a rank", acts=(Act(number=signal.SIGSEGV),)),
        FaultKind(name="abort", text="SIGABRT to a rank", acts=(Act(number=signal.SIGABRT),)),
        FaultKind(name="term", text="SIGTERM to a rank", acts=(Act(number=signal.SIGTERM),)),
        FaultKind(name="handler-hangs", text="a signal handler that never returns", acts=(Act(number=HANGS),)),
        FaultKind(
            name="handler-raises",
            text="a signal handler that raises an exception",
            acts=(Act(number=RAISES),),
            may_end_job=True,
            end_code=ScriptError.exit_code,
        ),
        FaultKind(
            name="handler-exits",
            text="a signal handler that calls sys.exit",
            acts=(Act(number=EXITS),),
            may_end_job=True,
            end_code=ScriptError.exit_code,
        ),
        FaultKind(
            name="handler-holds-lock",
            text="a signal handler that stands in C code and holds the interpreter lock",
            acts=(Act(number=HOLDS_LOCK),),
        ),
        FaultKind(
            name="kill-joiner",
            text="SIGKILL to a rank, and to the process that takes its place",
            acts=(Act(number=signal.SIGKILL), Act(number=signal.SIGKILL, whom=JOINER, after=(0.0, 3.0))),
            loses=(VICTIM, JOINER),
        ),
        FaultKind(
            name="stop-joiner",
            text="SIGKILL to a rank, SIGSTOP to the process that takes its place",
            acts=(Act(number=signal.SIGKILL), Act(number=signal.SIGSTOP, whom=JOINER, after=(0.0, 3.0))),
            loses=(VICTIM, JOINER),
        ),
    )


def _of_two(thresholds: Thresholds) -> tuple[FaultKind, ...]:
    del thresholds
    kill, soon = Act(number=signal.SIGKILL), (0.01, 0.2)
    return (
        FaultKind(
            name="hang-in-wait",
            text="a signal handler that never returns, entered while the main thread waits in a collective",
            acts=(
                Act(number=signal.SIGSTOP, whom=OTHER),
                Act(number=HANGS, once_it_waits=True),
                Act(number=signal.SIGCONT, whom=OTHER),
            ),
        ),
        FaultKind(
            name="two-kills",
            text="SIGKILL to two ranks within 1 to 20 ms",
            acts=(kill, Act(number=signal.SIGKILL, whom=OTHER, after=(0.001, 0.02))),
            loses=(VICTIM, OTHER),
        ),
        FaultKind(
            name="kill-then-hang",
            text="SIGKILL to a rank; 10 to 200 ms later a handler that never returns in another",
            acts=(kill, Act(number=HANGS, whom=OTHER, after=soon)),
            loses=(VICTIM, OTHER),
        ),
        FaultKind(
            name="kill-then-stop",
            text="SIGKILL to a rank; 10 to 200 ms later SIGSTOP to another",
            acts=(kill, Act(number=signal.SIGSTOP, whom=OTHER, after=soon)),
            loses=(VICTIM, OTHER),
        ),
    )


def _of_the_supervisor() -> tuple[FaultKind, ...]:
    stop, go_on = signal.SIGSTOP, signal.SIGCONT
    return (
        FaultKind(
            name="supervisor-stop",
            text=f"SIGSTOP to ntp run for {_SUPERVISOR_STOPS_S:g} s, in which a rank is killed",
            acts=(
                Act(number=stop, whom=SUPERVISOR),
                Act(number=signal.SIGKILL, after=(0.1, 1.0)),
                Act(number=go_on, whom=SUPERVISOR, after=(_SUPERVISOR_STOPS_S, _SUPERVISOR_STOPS_S)),
            ),
        ),
        *(
            FaultKind(
                name=f"supervisor-{name}",
                text=f"{number.name} to ntp run",
                acts=(Act(number=number, whom=SUPERVISOR),),
                loses=(),
                ends_job=True,
                end_code=code,
            )
            for name, number, code in (
                ("kill", signal.SIGKILL, -signal.SIGKILL),
                ("int", signal.SIGINT, 128 + signal.SIGINT),
                ("term", signal.SIGTERM, 128 + signal.SIGTERM),
            )
        ),
    )
