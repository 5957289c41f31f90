"""Keeps the record of a run that was given no folder: among this machine's temporary files, the last ten of each user.

Nobody plans for the night in which a rank is lost, so every run has a record, whether its user asked for one or not. It
is on a local disk, where many processes can append to one file, and only its owner can read it.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

from ntp_plugin.errors import ConfigError
from ntp_plugin.launch.run_folder import RunFolder, left_by_the_dead
from ntp_plugin.private_folders import changed_at, private_folders

_PREFIX = "ntp-record-"
_KEPT = 10


def new_record(log: Callable[[str], None]) -> RunFolder | None:
    """Make a folder for a record, and remove the oldest ones of dead runs.

    Returns:
        The folder; None where it cannot be made, because a run can train without a record.
    """
    parent = Path(tempfile.gettempdir())
    kept = sorted(left_by_the_dead(parent, _PREFIX), key=_changed)[1 - _KEPT :]
    try:
        folder = RunFolder(_PREFIX, parent, sparing=lambda left: left in kept)
    except OSError as error:
        log(f"no record of this run is kept: cannot make a folder in {parent}: {error.strerror}")
        return None
    log(f"the record of this run is {folder.path} (ntp status, ntp report)")
    return folder


def newest_record() -> Path:
    """Return the folder of this user's newest record, whether its run lives or not.

    Raises:
        ConfigError: There is none on this machine.
    """
    parent = Path(tempfile.gettempdir())
    found = [folder for folder in private_folders(parent, _PREFIX) if any(folder.glob("events*.jsonl"))]
    if not found:
        raise ConfigError(f"there is no record of a run in {parent}", fix="name the folder of the run")
    return max(found, key=_changed)


def _changed(folder: Path) -> float:
    return max(map(changed_at, folder.glob("events*.jsonl")), default=0.0)
