"""Every exception that a user can meet, in one tree.

    NtpError                      something that we noticed, with what to do about it
    ├── UserError (ValueError)    what was asked for cannot be done as it stands
    │   ├── ConfigError           a key, a flag or a file is wrong
    │   └── Refused               well-formed, but impossible
    │       ├── BelowMinimum      no replica is left that may train
    │       ├── StateLost         no living holder and no copy of some piece of state
    │       └── RestartIsBetter   the job could go on, and the user's figures say that it should not
    ├── SilentCorruption          replicas hold different bits of what they hold alike
    ├── NotStarted                a rank was lost before all others had begun to train
    ├── NotFinite                 a step has no finite result, and all replicas hold the same
    ├── StoreLost                 the job's store does not answer
    ├── ScriptError               a rank's own script has failed, which no loss has caused
    ├── PeerLost                  a collective was left because the membership changes; recovery follows
    └── AgreementError            the members could not come to one mind
        ├── Excluded              the others went on without this process: it must end
        ├── PlansDiffer           members made different plans of the same facts
        └── NoAgreement           some members did not report in time

A message says what happened, where, and the numbers; `way_out` says what to do. Programming mistakes are
assertions and are not in this tree.
"""

import sys
from collections.abc import Callable
from typing import Any, ClassVar

__all__ = [
    "AgreementError",
    "BelowMinimum",
    "ConfigError",
    "Excluded",
    "NoAgreement",
    "NotFinite",
    "NotStarted",
    "NtpError",
    "PeerLost",
    "PlansDiffer",
    "Refused",
    "RestartIsBetter",
    "ScriptError",
    "SilentCorruption",
    "StateLost",
    "StoreLost",
    "UserError",
]


class NtpError(Exception):
    """A failure that is explained: `what` happened and the `way_out`.

    Examples:
        >>> from ntp_plugin.errors import ConfigError, NtpError
        >>> try:
        ...     raise ConfigError("tp = 0 must be at least 1", way_out="tensor-parallel degree")
        ... except NtpError as error:
        ...     print(error)
        ...     print(error.exit_code)
        tp = 0 must be at least 1. Way out: tensor-parallel degree.
        2
    """

    exit_code: ClassVar[int] = 1
    """The code that a process ends with which does not catch the error."""

    def __init__(self, what: str, *, way_out: str = "") -> None:
        super().__init__(f"{what}. Way out: {way_out}." if way_out else f"{what}.")
        self.what = what
        self.way_out = way_out

    @classmethod
    def codes(cls) -> set[int]:
        """The exit codes of all errors of ours."""
        return {cls.exit_code}.union(*(kind.codes() for kind in cls.__subclasses__()))

    def __reduce__(self) -> tuple[Callable[..., "NtpError"], tuple[type["NtpError"], str, str]]:
        return _rebuilt, (type(self), self.what, self.way_out)


def _rebuilt(kind: type[NtpError], what: str, way_out: str) -> NtpError:
    """An error that came from another process."""
    return kind(what, way_out=way_out)


class UserError(NtpError, ValueError):
    """What the user asked for cannot be done as it stands."""

    exit_code = 2


class ConfigError(UserError):
    """A key, a flag or a file is wrong."""


class Refused(UserError):
    """The request is well-formed, but what it asks for is impossible."""


class BelowMinimum(Refused):
    """No replica is left that may train."""

    exit_code = 3


class StateLost(Refused):
    """Some piece of training state has no living holder and no copy."""

    exit_code = 4


class RestartIsBetter(Refused):
    """The job could go on, but by what the user has said of restarts it is better to begin again whole."""

    exit_code = 8


class SilentCorruption(NtpError):
    """Replicas hold different bits of what they hold alike."""

    exit_code = 7


class NotStarted(NtpError):
    """A rank was lost while others had not begun to train: these cannot begin without it, and nothing is lost yet."""


class NotFinite(NtpError):
    """The framework ends the job at a result that is not finite, and all replicas hold the same state."""


class StoreLost(NtpError):
    """The job's store does not answer: its host is lost, or this one is cut off."""

    exit_code = 6


class ScriptError(NtpError):
    """A rank's own script has failed, and no loss has caused it: more hardware would not help."""

    exit_code = 9


class PeerLost(NtpError):
    """A collective was left because the membership changes; recovery follows.

    A process ends by it only where nothing has begun yet that could go on: while a framework starts up, say.
    """

    def __init__(self, what: str, *, way_out: str = "") -> None:
        super().__init__(what, way_out=way_out or "a loss before training has begun ends a job: start it again")


class AgreementError(NtpError):
    """The members could not come to one mind."""


class Excluded(AgreementError):
    """The others went on without this process: it must end."""

    exit_code = 5


class PlansDiffer(AgreementError):
    """Members made different plans of the same facts, so nobody acts."""


class NoAgreement(AgreementError):
    """Some members did not report in time."""


def in_one_line(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """An excepthook for a process that others start: an error of ours is a line and its exit code."""

    def tell(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if not isinstance(error, NtpError):
            otherwise(kind, error, trace)
            return
        assert sys.__stderr__ is not None, "a process that others start has one"
        print(f"ntp: {error}", file=sys.__stderr__, flush=True)  # torch's own hook collects what goes to sys.stderr
        sys.exit(error.exit_code)

    return tell
