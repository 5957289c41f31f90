"""Reads a TOML or JSON file into a plain mapping."""

import json
import tomllib
from pathlib import Path
from typing import Any

from ntp_plugin.errors import ConfigError


def read_file(path: Path, *, least: str = "") -> dict[str, Any]:
    """Read the top table of a file.

    Args:
        path: A `.toml` or `.json` file in UTF-8, with or without a byte-order mark.
        least: The fix to suggest in the error if the file is empty.

    Raises:
        ConfigError: The file cannot be read, or its content does not match its suffix.
    """
    text = _text_of(path)
    if not text.strip():
        raise ConfigError(f"{path} is empty", fix=least)
    try:
        if path.suffix == ".toml":
            return tomllib.loads(text)
        parsed = json.loads(text, object_pairs_hook=_no_key_twice, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise ConfigError(f"{path} is not valid {kind}: {str(error).rstrip('.')}") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path} must hold one JSON object at the top, not {type(parsed).__name__}")
    return parsed


def _text_of(path: Path) -> str:
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(f"{path} has no known ending", fix="name it .toml or .json")
    try:
        return path.read_text(encoding="utf-8-sig")  # editors of Windows begin a file with a byte-order mark
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path} cannot be read: {reason}") from None


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"the key {name!r} appears twice in one object")
        table[name] = value
    return table


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is not a number that JSON allows")
