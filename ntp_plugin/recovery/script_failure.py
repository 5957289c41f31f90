"""Reports an exception of the user's script to the host's supervisor, which decides whether it is the job's error.

A process that ends by an exception looks, from outside, like one whose host has failed: it ends with code 1. So the
worker writes the exception to a file, named by its pid, in the folder of the run before it ends. The supervisor reads
the file when it sees the end. Without a file a signal, an exit in C code, or `os._exit` has ended the process, and it
is lost as by any fault.

An exception that a fault has caused is not the script's: an error of this package (a loss, a lost store), of a
collective, or of the device, also if the script raised another one from it.

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
"""The device reports these errors, but the script is their cause."""
_FAILURE, _CODE = "json", "code"
"""The suffixes of the names of reports."""
_LONGEST = 16_000
"""Characters of a traceback; its end is what counts."""
_FIRST_OF_SIGNALS = 128
"""A script that ends on request of signal n exits with 128 + n; that is no error of its own."""


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
    """Whether it is the consequence of a failed collective or device."""

    def encode(self) -> str:
        """The failure as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def decode(cls, text: str) -> "ScriptFailure":
        """Read the text that `encode` wrote; raises `ValueError` or `TypeError` for any other text."""
        return cls(**json.loads(text))

    @property
    def identity(self) -> str:
        """Equal for failures of the same kind at the same place."""
        return f"{self.kind} at {self.place}"

    @property
    def in_words(self) -> str:
        """The failure as one line for a message."""
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
        is_member: The rank has been in a view. The others go on without a rank that fails before it joins them.
        beside_a_loss: A rank was lost a moment before, which may have caused this failure.
        others_are_done: The others have reached the end: none may repeat the work of this one, such as saving a model.
    """
    if on_error == "evict" or failure.by_a_fault:
        return False
    return again or (on_error == "stop" and is_member and (others_are_done or not beside_a_loss))


# ---------------------------------------------------------------- the worker


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Report an exception of the script, and raise it again."""
    try:
        yield
    except (Exception, SystemExit) as error:
        folder = os.environ.get(FOLDER)
        if folder is not None:
            # Without a report the rank is lost as by a fault, and its output has the traceback.
            with contextlib.suppress(OSError):
                _report(Path(folder), error)
        raise


def _report(folder: Path, error: BaseException) -> None:
    ours = next((one for one in _chain(error) if isinstance(one, NtpError)), None)
    if ours is not None:
        _write(folder, _CODE, str(ours.exit_code))
    elif (failure := failure_of(error)) is not None:
        _write(folder, _FAILURE, failure.encode())


def failure_of(error: BaseException) -> ScriptFailure | None:
    """The report of an exception; None for an end that this package or a signal has caused."""
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
    text = "".join(traceback.format_exception(error))[-_LONGEST:]
    by_a_fault = any(_is_a_fault(one) for one in chain)
    return ScriptFailure(kind=kind, message=message, place=place, traceback=text, by_a_fault=by_a_fault)


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
    """Read the report of a process that has ended; None if there is none."""
    try:
        return ScriptFailure.decode((folder / f"{pid}.{_FAILURE}").read_text())
    except (OSError, ValueError, TypeError):
        return None


def forget(folder: Path, pid: int) -> None:
    """Remove the reports of an earlier process with this pid."""
    for kind in (_FAILURE, _CODE):
        (folder / f"{pid}.{kind}").unlink(missing_ok=True)


def read_code(folder: Path, pid: int) -> int | None:
    """Read the exit code of a process that was ending by an error of this package; None if there is none.

    It may have been killed since: a busy machine takes long to unload a process.
    """
    try:
        return int((folder / f"{pid}.{_CODE}").read_text())
    except (OSError, ValueError):
        return None
