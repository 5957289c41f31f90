"""Decides how long the copies of a dead run stay: for the time that the run was given, or until a new run needs room.

A job that dies leaves its copies, and often waits for hours until somebody resumes it. Meanwhile the same user starts
other jobs on the host. So a new run removes the copies that are past their time. It removes others, oldest first, only
where it would lack room: where less is free than the largest of the dead runs takes, or than a quarter of the file
system. How much a run needs is not known at its start; its predecessor, perhaps among the dead, is the best guess.

`ntp run --ntp-copies-keep` sets the time. The run's folder records it, so that each job has its own.
"""

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from ntp_plugin.launch.run_folder import COPIES, RunFolder, left_by_the_dead, shared_memory

DAY_S = 86400.0
_KEEP = "keep-s"
_SHARE = 4
"""One part in so many of the file system has to be free when a run begins."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeadRun:
    """The copies that a dead run has left."""

    folder: Path
    died_at: float
    """When the last copy was made, in seconds since 1970; 0 where there is none."""
    keep_s: float
    """How long they stay after that."""
    size: int
    """In bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Bytes of the file system."""

    free: int
    total: int


# ---------------------------------------------------------------- which copies to remove: PURE


def to_remove(dead: Sequence[DeadRun], spared: Sequence[DeadRun], *, now: float, room: Room) -> dict[Path, str]:
    """Decide which copies of dead runs a new run removes.

    Args:
        dead: The runs whose copies may be removed.
        spared: The others, such as the one that the new run resumes.
        now: Seconds since 1970.
        room: The free space before anything is removed.

    Returns:
        Folder -> the reason why it is removed.
    """
    goes = {run.folder: reason for run in dead if (reason := _reason(run, now))}
    free = room.free + sum(run.size for run in dead if run.folder in goes)
    needed = max(room.total // _SHARE, *(run.size for run in (*dead, *spared)), 0)
    for run in sorted(dead, key=lambda run: run.died_at):
        if run.folder not in goes and run.size and free < needed:
            goes[run.folder] = (
                f"the oldest dead run ({in_words(now - run.died_at)} dead) takes {run.size / 1e6:.1f} MB,"
                f" {free / 1e6:.1f} MB are free, and this run may need {needed / 1e6:.1f} MB"
            )
            free += run.size
    return goes


def _reason(run: DeadRun, now: float) -> str:
    if not run.died_at:
        return "its run is dead and has left no copies"
    dead_s = now - run.died_at
    if dead_s < run.keep_s:
        return ""
    return f"its run has been dead for {in_words(dead_s)}, and its copies were to stay for {in_words(run.keep_s)}"


def in_words(seconds: float) -> str:
    """Return a duration in its two largest units, as `1 d 3 h`."""
    left = int(max(0.0, seconds))
    parts: list[str] = []
    for name, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if left >= size or (name == "s" and not parts):
            parts.append(f"{left // size} {name}")
        left %= size
    return " ".join(parts[:2])


# ---------------------------------------------------------------- folders on this host


def new_folder(*, keep_s: float, spares: Callable[[Path], bool], log: Callable[[str], None]) -> RunFolder:
    """Make the folder for the copies of a new run, and remove the folders that `to_remove` chooses.

    Args:
        keep_s: How long the copies of this run stay if it dies.
        spares: Whether a dead run's folder stays in any case.
        log: Called with a log line for each folder that is removed.
    """
    parent = shared_memory()
    left = [dead_run(folder) for folder in left_by_the_dead(parent, COPIES)]
    dead, spared = ([run for run in left if spares(run.folder) == stays] for stays in (False, True))
    goes = to_remove(dead, spared, now=time.time(), room=room_in(parent))
    made = RunFolder(
        COPIES,
        parent,
        sparing=lambda folder: folder not in goes,
        removing=lambda folder: log(f"removing {folder}: {goes[folder]}"),
    )
    (made.path / _KEEP).write_text(f"{keep_s}\n")
    return made


def dead_run(folder: Path) -> DeadRun:
    """Return when the run of a private folder died, how long its copies stay, and their size."""
    manifests = folder.glob("*/*.json")
    return DeadRun(
        folder=folder,
        died_at=max((found.st_mtime for found in _stats(manifests)), default=0.0),
        keep_s=_kept(folder),
        size=sum(found.st_blocks * 512 for found in _stats(folder.glob("*/*"))),
    )


def _kept(folder: Path) -> float:
    """Return how long the copies of a run stay, as it has recorded; a day where the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        seconds = float((folder / _KEEP).read_text())
        if math.isfinite(seconds) and seconds >= 0:
            return seconds
    return DAY_S


def _stats(paths: Iterable[Path]) -> Iterator[os.stat_result]:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # another run is removing it
            yield path.lstat()


def room_in(folder: Path) -> Room:
    """Return the free space where copies are. It is memory, so no more than the host has available."""
    state = os.statvfs(folder)
    free = state.f_bavail * state.f_frsize
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = min(free, next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")))
    return Room(free=free, total=state.f_blocks * state.f_frsize)
