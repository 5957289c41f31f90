"""How a worker reports an exception of its own script to its host's supervisor, and what the supervisor makes of it.

A process that ends by an exception looks, from outside, like one whose host has failed: it ends with code 1. So the
worker writes the exception to a file, named by its pid, in the folder of the run before it ends. The supervisor reads
the file when it sees the end. No file: a signal, an exit in C code, or `os._exit` has ended the process, and it is lost
as by any fault.

An exception that a fault has caused is not the script's: an error of this package (a loss, a store that is gone), an
error of a collective, or an error of the device, also where the script has raised another one from it.

No torch: classes of torch are known by their names.
"""

import contextlib
import dataclasses
import json
import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from ntp_plugin.errors import NtpError

type OnError = Literal["stop", "evict", "retry"]
ON_ERROR: tuple[OnError, ...] = ("stop", "evict", "retry")
FOLDER = "NTP_FAILURES"
"""The environment variable that names the folder for reports."""
_FAULT_CLASSES = {"DistError", "AcceleratorError"}
_FAULT_WORDS = re.compile(
    r"gloo|NCCL|CUDA (driver )?error|HIP error|uncorrectable|\bECC\b|\[c10d\]|connectFullMesh", re.I
)
_BUG_WORDS = re.compile(r"device-side assert|out of memory", re.I)
"""The device says so, and the script is the cause."""
_FAILURE, _CODE = "json", "code"
"""How the names of reports end."""
_LONGEST = 16_000
"""Characters of a traceback; its end is what counts."""
_FIRST_OF_SIGNALS = 128
"""A script that is asked to end by signal n exits with 128 + n; that is no error of its own."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScriptFailure:
    """An exception, or a `sys.exit` with a code, that ended a worker."""

    kind: str
    """The name of its class."""
    message: str
    place: str
    """The innermost frame: file, line, function."""
    traceback: str
    by_a_fault: bool = False
    """A collective or the device has failed, and this is the consequence."""

    def encode(self) -> str:
        """As one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def decode(cls, text: str) -> "ScriptFailure":
        """From `encode`; raises `ValueError` or `TypeError` where it is something else."""
        return cls(**json.loads(text))

    @property
    def identity(self) -> str:
        """The same for failures of the same kind at the same place."""
        return f"{self.kind} at {self.place}"

    @property
    def in_words(self) -> str:
        """One line, for a message."""
        first = self.message.strip().splitlines()[:1]
        return f"{self.kind}: {first[0] if first else '(no message)'} ({self.place})"


def ends_the_job(
    failure: ScriptFailure,
    *,
    on_error: OnError,
    again: bool,
    is_member: bool,
    beside_a_loss: bool,
    others_are_done: bool,
) -> bool:
    """Whether a failure is the job's error; otherwise its rank is lost, as by a fault of its host.

    Args:
        failure: What the rank reported.
        on_error: The user's choice (`--ntp-on-error`).
        again: A member of the job has failed in the same way before.
        is_member: The rank has been in a view. The others do without a rank that fails before it joins them.
        beside_a_loss: A rank was lost a moment before, which may have caused this failure.
        others_are_done: The others have come to the end: nobody may do again what this one did, saving a model, say.
    """
    if on_error == "evict" or failure.by_a_fault:
        return False
    return again or (on_error == "stop" and is_member and (others_are_done or not beside_a_loss))


# ---------------------------------------------------------------- the worker


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Report what the script raises, and let it go on to whoever handles it."""
    try:
        yield
    except (Exception, SystemExit) as error:
        folder = os.environ.get(FOLDER)
        if folder is not None:
            with contextlib.suppress(OSError):  # then it is lost as by a fault, and its traceback is in its output
                _report(Path(folder), error)
        raise


def _report(folder: Path, error: BaseException) -> None:
    ours = next((one for one in _chain(error) if isinstance(one, NtpError)), None)
    if ours is not None:
        _write(folder, _CODE, str(ours.exit_code))
    elif (failure := failure_of(error)) is not None:
        _write(folder, _FAILURE, failure.encode())


def failure_of(error: BaseException) -> ScriptFailure | None:
    """What to report of an exception; None for an end that this package or a signal has brought about."""
    chain = list(_chain(error))
    if any(isinstance(one, NtpError) for one in chain):
        return None
    if isinstance(error, SystemExit):
        if not error.code or (isinstance(error.code, int) and error.code > _FIRST_OF_SIGNALS):
            return None
        kind, message = "SystemExit", f"exited with {error.code}"
    else:
        kind, message = type(error).__qualname__, str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "no frame"
    told = "".join(traceback.format_exception(error))[-_LONGEST:]
    by_a_fault = any(_is_a_fault(one) for one in chain)
    return ScriptFailure(kind=kind, message=message, place=place, traceback=told, by_a_fault=by_a_fault)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen = set[int]()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)


def _is_a_fault(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError) or _BUG_WORDS.search(str(error)):
        return False
    of_torch = {kind.__name__ for kind in type(error).__mro__ if kind.__module__.split(".")[0] == "torch"}
    return bool(of_torch & _FAULT_CLASSES) or _FAULT_WORDS.search(str(error)) is not None


def _write(folder: Path, kind: str, text: str) -> None:
    unnamed = folder / f"{os.getpid()}.new"
    unnamed.write_text(text)
    unnamed.rename(folder / f"{os.getpid()}.{kind}")


# ---------------------------------------------------------------- the supervisor


def read_failure(folder: Path, pid: int) -> ScriptFailure | None:
    """What a process that has ended had reported; None where it reported nothing."""
    try:
        return ScriptFailure.decode((folder / f"{pid}.{_FAILURE}").read_text())
    except (OSError, ValueError, TypeError):
        return None


def forget(folder: Path, pid: int) -> None:
    """What a process with this number had reported: the number belongs to another one now."""
    for kind in (_FAILURE, _CODE):
        (folder / f"{pid}.{kind}").unlink(missing_ok=True)


def read_code(folder: Path, pid: int) -> int | None:
    """The exit code that a process was about to end with by an error of this package; None where there is none. It may
    have been killed since: a busy machine takes long to unload a process."""
    try:
        return int((folder / f"{pid}.{_CODE}").read_text())
    except (OSError, ValueError):
        return None
