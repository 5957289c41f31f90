"""Find what a test leaves behind: processes, threads of the plugin, sockets, files in shared memory."""

import contextlib
import dataclasses
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

from ntp_plugin.groups.process_groups import ElasticGroups
from ntp_plugin.groups.sockets import SocketId, open_sockets


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProcessResources:
    """What this process had when it began."""

    threads: frozenset[threading.Thread]
    sockets: frozenset[SocketId]

    @classmethod
    def look(cls) -> "ProcessResources":
        return cls(threads=frozenset(threading.enumerate()), sockets=open_sockets())


def left_behind(before: ProcessResources, process_groups: Sequence[int], folder: Path) -> list[str]:
    """Return one line for each resource that should not be there."""
    threads = [thread.name for thread in threading.enumerate() if thread not in before.threads]
    return [
        *(f"a process that rank process {group} started" for group in process_groups if _has_members(group)),
        *(f"thread {name}" for name in threads if name.startswith("ntp-")),
        *(f"{socket} as descriptor {descriptor}" for descriptor, socket in sorted(open_sockets() - before.sockets)),
        *([f"folder {folder}"] if folder.exists() else []),
    ]


def held(groups: ElasticGroups) -> tuple[int, int, int]:
    """This process' threads and descriptors, less what torch keeps for each replaced backend; its memory in bytes."""
    threads, descriptors = (len(list(Path("/proc/self", kind).iterdir())) for kind in ("task", "fd"))
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return threads - 3 * groups.replaced, descriptors - 4 * groups.replaced, pages * os.sysconf("SC_PAGESIZE")


def end_what_they_started(process_groups: Sequence[int]) -> None:
    """SIGKILL for processes of ranks that have ended themselves."""
    for group in process_groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _has_members(process_group: int) -> bool:
    try:
        os.killpg(process_group, 0)
    except ProcessLookupError:
        return False
    return True
