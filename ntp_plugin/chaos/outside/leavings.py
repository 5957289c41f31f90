"""What remains when a job has ended: processes with its mark, files in shared memory, temporary files.

Two things may remain. Copies of a run that did not end well are there for `--ntp-resume`. And an `ntp run` that was
killed removes nothing itself; its folders in shared memory are removed by the next one of the same user. Those are
`kept`, and a later run of the campaign has to have removed what it is to remove.
"""

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from ntp_plugin.chaos.ending import Wait
from ntp_plugin.chaos.outside import processes
from ntp_plugin.launch.run_folder import COPIES, owner, shared_memory

_OURS = "ntp-"
_LOOK_S = 0.2
REMOVED_BY_THE_NEXT = "ntp-run-"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Leavings:
    """What a run has left."""

    ended_at: float
    """When the last process had ended, by the clock of the faults; the time limit where some had not."""
    processes: tuple[str, ...] = ()
    """In words; they are killed then."""
    files: tuple[str, ...] = ()
    kept: tuple[Path, ...] = ()
    """Folders in shared memory that may stay."""


def files_there() -> frozenset[Path]:
    """Return this user's files in shared memory that have one of our names."""
    found = set[Path]()
    for path in shared_memory().glob(f"{_OURS}*"):
        with contextlib.suppress(OSError):  # it was just removed
            if path.lstat().st_uid == os.getuid():
                found.add(path)
    return frozenset(found)


def look(
    mark: tuple[str, str],
    *,
    supervisor: int,
    before: Collection[Path],
    temporary: Path,
    limit_s: float,
    was_killed: bool,
    ended_well: bool,
    wait: Wait,
) -> Leavings:
    """Wait for the last process to end, at most for so long, and then look at files. `before`: what was there before
    the job; `temporary`: where its temporary files are, of which those count that have our names: torch leaves empty
    folders for logs. Folders of runs count where the job's `supervisor` made them: another job may have begun, and
    died, meanwhile."""
    began = time.monotonic()
    while (left := processes.marked(*mark)) and time.monotonic() - began < limit_s:
        wait(_LOOK_S)
    ended_at = time.time()
    words = tuple(processes.where(process) for process in left)
    processes.kill_all(left)
    kept, files = list[Path](), list[Path]([] if was_killed else sorted(temporary.glob(f"{_OURS}*")))
    for path in sorted(files_there().difference(before)):
        made_by = owner(path)
        if made_by not in (None, supervisor):
            continue
        if not (was_killed or (path.name.startswith(COPIES) and not ended_well)):
            files.append(path)
        elif made_by == supervisor:  # what is nobody's may be another program's, and what is kept is removed later
            kept.append(path)
    return Leavings(ended_at=ended_at, processes=words, files=tuple(map(str, files)), kept=tuple(kept))


def remove(kept: Collection[Path]) -> None:
    """What runs of this campaign have left and nobody needs any more."""
    for path in kept:
        shutil.rmtree(path, ignore_errors=True)
