"""Reads the settings of a command from a file, from flags, or from both; a flag overrides the same key of the file."""

import argparse
from pathlib import Path

from ntp_plugin.cli.parser import OneLineParser
from ntp_plugin.config import schema
from ntp_plugin.config.files import read_file
from ntp_plugin.errors import ConfigError


def add_file(parser: OneLineParser) -> None:
    """Add the file of settings to a parser: as a positional argument, and as --config."""
    parser.add_argument(
        "file", metavar="FILE", nargs="?", help="a .toml or .json file with the same keys as the flags; flags win"
    )
    parser.add_argument("--config", metavar="FILE", help="the same file, as a flag")


def configured[Section](section: type[Section], parsed: argparse.Namespace, *, least: str) -> Section:
    """Build a section from the file and the flags of a command.

    Args:
        section: A class of `config/sections.py`, or one like it; its keys are those of the file and of the flags.
        parsed: The parsed command line, of a parser with `add_file` and `schema.add_flags`.
        least: The least that a file must contain, for the error about an empty one.

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
            fix="name one file, and override its keys by flags",
        )
    if "" in named:
        raise ConfigError("the name of the file is empty", fix="name a .toml or .json file")
    return Path(named.pop()) if named else None
