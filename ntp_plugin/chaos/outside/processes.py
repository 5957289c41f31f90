"""The processes of a job, as /proc has them, and signals to them.

A process is known by its pid and the instant at which it was started, so that a pid which the system has given to
somebody else is not taken for it. The job's processes carry a mark in their environment, which their children inherit
wherever they go.
"""

import contextlib
import dataclasses
import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

_PROC = Path("/proc")
_STATE, _PARENT, _STARTED = 0, 1, 19
"""Fields of /proc/PID/stat behind the command's name."""
ZOMBIE = "Z"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProcessInfo:
    """One that was there when it was looked for."""

    pid: int
    started: int
    """Clock ticks since the machine was started."""
    parent: int = dataclasses.field(compare=False)
    state: str = dataclasses.field(compare=False)


def all_processes() -> dict[int, ProcessInfo]:
    """Return the machine's processes by pid, without zombies, of which nothing runs."""
    found = (read(int(path.name)) for path in _PROC.iterdir() if path.name.isdigit())
    return {process.pid: process for process in found if process is not None and process.state != ZOMBIE}


def read(pid: int) -> ProcessInfo | None:
    """One process, or None if it is not there."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return None
    return ProcessInfo(pid=pid, started=int(fields[_STARTED]), parent=int(fields[_PARENT]), state=fields[_STATE])


def environment(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty if it is not there, or belongs to another user."""
    try:
        words = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (word.partition(b"=") for word in words if b"=" in word)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def marked(name: str, value: str) -> list[ProcessInfo]:
    """All processes of the machine that were started with this in their environment."""
    return [process for process in all_processes().values() if environment(process.pid).get(name) == value]


def below(top: int, processes: Mapping[int, ProcessInfo]) -> set[ProcessInfo]:
    """A process, its children, their children, and so on."""
    found = {processes[top]} if top in processes else set[ProcessInfo]()
    while True:
        pids = {process.pid for process in found}
        more = {process for process in processes.values() if process.parent in pids} - found
        if not more:
            return found
        found |= more


def is_there(process: ProcessInfo) -> bool:
    """Whether it still is, and is no zombie."""
    now = read(process.pid)
    return now == process and now is not None and now.state != ZOMBIE


def send(process: ProcessInfo, number: int) -> bool:
    """A signal, to this process and to no other that has its pid by now; whether it was sent."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if not is_there(process):
            return False
        signal.pidfd_send_signal(descriptor, number)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def kill_all(processes: Iterable[ProcessInfo]) -> None:
    """SIGKILL for each."""
    for process in processes:
        send(process, signal.SIGKILL)


def handles(process: ProcessInfo, number: int) -> bool:
    """Whether it has a handler for a signal."""
    with contextlib.suppress(OSError):
        for line in (_PROC / str(process.pid) / "status").read_text().splitlines():
            name, _, mask = line.partition(":")
            if name == "SigCgt":
                return bool(int(mask, 16) >> (number - 1) & 1)
    return False


def ran_s(process: ProcessInfo) -> float:
    """How long its main thread has had a processor."""
    try:
        spent = (_PROC / str(process.pid) / "task" / str(process.pid) / "schedstat").read_text().split()[0]
    except (OSError, IndexError):
        return 0.0
    return int(spent) / 1e9


def where(process: ProcessInfo) -> str:
    """What a person wants to know of one that hangs."""
    now = read(process.pid)
    waits = ""
    with contextlib.suppress(OSError):
        waits = (_PROC / str(process.pid) / "wchan").read_text()
    variables = environment(process.pid)
    rank = f"rank {variables['RANK']}" if "RANK" in variables else "no rank in its environment"
    return f"pid {process.pid}, {rank}, state {now.state if now else 'gone'}, main thread in {waits or 'user space'}"
