"""All exceptions that the plugin raises for a user, in one tree.

    NtpError                      a failure with an explanation, and a fix where there is one
    ├── UserError (ValueError)    the request of the user cannot be carried out
    │   ├── ConfigError           a key, a flag or a file is wrong
    │   └── Refused               the request is well-formed, but impossible
    │       ├── BelowMinimum      no replica is left that may train
    │       ├── StateLost         some training state has no live holder and no copy
    │       └── RestartIsBetter   the job could go on, but a restart is cheaper by the user's figures
    ├── SilentCorruption          replicas hold different bits of replicated state
    ├── NotStarted                a rank was lost before all others had begun to train
    ├── NotSaved                  the training is over, and its newest checkpoint could not be written
    ├── NotFinite                 a step has no finite result, and all replicas hold the same state
    ├── StoreLost                 the job's store does not answer
    ├── ScriptError               a rank's own script has failed, and no loss has caused it
    ├── PeerLost                  a collective was interrupted because the membership changes; recovery follows
    └── AgreementError            the members could not agree
        ├── Excluded              the others went on without this process, which must end
        ├── PlansDiffer           members made different plans from the same facts
        └── NoAgreement           some members did not report in time

A message says what happened, where, and the numbers; `fix` says what to do. Programming mistakes are assertions,
which are not in this tree.
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
    "NotSaved",
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
    """A failure with an explanation: `what` happened, and the `fix`.

    Examples:
        >>> from ntp_plugin.errors import ConfigError, NtpError
        >>> try:
        ...     raise ConfigError("tp = 0 must be at least 1", fix="tensor-parallel degree")
        ... except NtpError as error:
        ...     print(error)
        ...     print(error.exit_code)
        tp = 0 must be at least 1. Fix: tensor-parallel degree.
        2
    """

    exit_code: ClassVar[int] = 1
    """The exit code of a process that does not catch the error."""

    def __init__(self, what: str, *, fix: str = "") -> None:
        super().__init__(f"{what}. Fix: {fix}." if fix else f"{what}.")
        self.what = what
        self.fix = fix

    @classmethod
    def codes(cls) -> set[int]:
        """Return the exit codes of this error and all its subclasses."""
        return {cls.exit_code}.union(*(kind.codes() for kind in cls.__subclasses__()))

    def __reduce__(self) -> tuple[Callable[..., "NtpError"], tuple[type["NtpError"], str, str]]:
        return _rebuilt, (type(self), self.what, self.fix)


def _rebuilt(kind: type[NtpError], what: str, fix: str) -> NtpError:
    """Rebuild an error from another process."""
    return kind(what, fix=fix)


class UserError(NtpError, ValueError):
    """The request of the user cannot be carried out."""

    exit_code = 2


class ConfigError(UserError):
    """A key, a flag or a file is wrong."""


class Refused(UserError):
    """The request is well-formed, but what it asks for is impossible."""


class BelowMinimum(Refused):
    """No replica is left that may train."""

    exit_code = 3


class StateLost(Refused):
    """Some training state has no live holder and no copy."""

    exit_code = 4


class RestartIsBetter(Refused):
    """The job could go on, but a restart with all ranks is better by the user's figures about restarts."""

    exit_code = 8


class SilentCorruption(NtpError):
    """Replicas hold different bits of replicated state."""

    exit_code = 7


class NotStarted(NtpError):
    """A rank was lost before others had begun to train. They cannot begin without it, and no training is lost."""


class NotFinite(NtpError):
    """The framework ends the job because a result is not finite, and all replicas hold the same state."""


class NotSaved(NtpError):
    """The training is over, and its newest checkpoint could not be written."""

    exit_code = 10


class StoreLost(NtpError):
    """The job's store does not answer: its host is lost, or this one is cut off."""

    exit_code = 6


class ScriptError(NtpError):
    """A rank's own script has failed, and no loss has caused it: other hardware would not help."""

    exit_code = 9


class PeerLost(NtpError):
    """A collective was interrupted because the membership changes; recovery follows.

    It ends a process only before training has begun, for example while a framework starts up.
    """

    def __init__(self, what: str, *, fix: str = "") -> None:
        super().__init__(what, fix=fix or "a loss before training has begun ends a job: start it again")


class AgreementError(NtpError):
    """The members could not agree."""


class Excluded(AgreementError):
    """The others went on without this process, which must end."""

    exit_code = 5


class PlansDiffer(AgreementError):
    """Members made different plans from the same facts, so none of them acts."""


class NoAgreement(AgreementError):
    """Some members did not report in time."""


def in_one_line(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Return an excepthook that prints an `NtpError` in one line and exits with its code, for a process we start.

    Args:
        otherwise: The excepthook for all other exceptions.
    """

    def report(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if not isinstance(error, NtpError):
            otherwise(kind, error, trace)
            return
        assert sys.__stderr__ is not None, "a process that we start has one"
        print(f"ntp: {error}", file=sys.__stderr__, flush=True)  # torch's own hook collects what goes to sys.stderr
        sys.exit(error.exit_code)

    return report
