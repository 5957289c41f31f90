"""The record of a run that was told no folder for it: among this machine's temporary files, the last ten of each user.

Nobody plans for the night in which a rank is lost, so a run has its record whether it was asked for one or not. It is
on a local disk, where many processes may append to one file, and readable by its owner alone.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

from ntp_plugin.errors import ConfigError
from ntp_plugin.launch.run_folder import RunFolder, left_by_the_dead
from ntp_plugin.private_folders import changed_at, private_folders

_PREFIX = "ntp-record-"
_KEPT = 10


def new_record(said: Callable[[str], None]) -> RunFolder | None:
    """A folder for one; those of dead runs go, all but the newest. None where there is no room, which is no reason not
    to train."""
    parent = Path(tempfile.gettempdir())
    kept = sorted(left_by_the_dead(parent, _PREFIX), key=_changed)[1 - _KEPT :]
    try:
        folder = RunFolder(_PREFIX, parent, sparing=lambda left: left in kept)
    except OSError as error:
        said(f"there is no record of this run: {parent}: {error.strerror}")
        return None
    said(f"the record of this run is {folder.path} (ntp status, ntp report)")
    return folder


def newest_record() -> Path:
    """Of this user's runs, whether it lives or not."""
    parent = Path(tempfile.gettempdir())
    found = [folder for folder in private_folders(parent, _PREFIX) if any(folder.glob("events*.jsonl"))]
    if not found:
        raise ConfigError(f"there is no record of a run in {parent}", way_out="name the folder of the run")
    return max(found, key=_changed)


def _changed(folder: Path) -> float:
    return max(map(changed_at, folder.glob("events*.jsonl")), default=0.0)
