"""What a command is asked for: by a file, by flags, or by both, where flags win key by key."""

import argparse
from pathlib import Path

from ntp_plugin.cli.parser import OneLineParser
from ntp_plugin.config import schema
from ntp_plugin.config.files import read_file
from ntp_plugin.errors import ConfigError


def add_file(parser: OneLineParser) -> None:
    """Let a command take one file, as its argument or behind --config."""
    parser.add_argument(
        "file", metavar="FILE", nargs="?", help="a .toml or .json file with the same keys as the flags; flags win"
    )
    parser.add_argument("--config", metavar="FILE", help="the same file, as a flag")


def configured[Section](section: type[Section], parsed: argparse.Namespace, *, least: str) -> Section:
    """Build a section from the file and the flags of a command.

    Args:
        section: The class of `config/sections.py`, or one like it, whose keys the file and the flags have.
        parsed: The command line of a parser that `add_file` and `schema.add_flags` have made.
        least: What to write into a file that is empty, for the error that says so.

    Raises:
        ConfigError: A key, a flag or the file is wrong, or two files are named.
    """
    flags, path = schema.flag_values(section, parsed), _file(parsed)
    if path is None:
        return schema.build(section, flags, name=lambda key: schema.flag_name(section, key))
    name = schema.dotted(f"{path}: ")
    return schema.build(section, flags, schema.check(section, read_file(path, least=least), name=name), name=name)


def _file(parsed: argparse.Namespace) -> Path | None:
    named = {text for text in (parsed.file, parsed.config) if text is not None}
    if len(named) > 1:
        raise ConfigError(
            f"two files are named: {parsed.file}, and --config {parsed.config}",
            way_out="name one; what differs from it can be said by flags",
        )
    if "" in named:
        raise ConfigError("the name of the file is empty", way_out="name a .toml or .json file")
    return Path(named.pop()) if named else None
