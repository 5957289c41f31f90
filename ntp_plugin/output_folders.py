"""Checks the folders that a user names for results, before hours of work produce results to write."""

import os
from pathlib import Path

from ntp_plugin.errors import ConfigError


def require_usable(folder: Path | str, flag: str) -> Path:
    """Raise unless results can be written to the folder. It makes nothing yet.

    Args:
        folder: The folder, as the user has typed it.
        flag: The flag by which it was given, for the error.

    Returns:
        The folder, which need not exist.

    Raises:
        ConfigError: The name is empty, a file is in the way, or this user may not write there.
    """
    path, fix = Path(folder), "name a folder that can be made or written to"
    if not str(folder):
        raise ConfigError(f"{flag} is empty", fix=fix)
    nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise ConfigError(f"{flag} {path}: {nearest} is a file", fix=fix)
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {path}: this user may not write to {nearest}", fix=fix)
    return path


def require_new(folder: Path | str, flag: str) -> Path:
    """Raise `ConfigError` unless the folder is usable, and empty or new."""
    path = require_usable(folder, flag)
    if path.exists() and any(path.iterdir()):
        raise ConfigError(f"{path} is not empty", fix="name another folder, or remove this one")
    return path
