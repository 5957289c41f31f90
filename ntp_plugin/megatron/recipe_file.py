"""Reads a recipe in the form of Megatron-LM's functional tests: a YAML file with `MODEL_ARGS` and `ENV_VARS`. PURE.

    MODEL_ARGS:
      --tensor-model-parallel-size: 4
      --sequence-parallel: true

Names of such recipes may say for how many GPUs they are: `..._dgx_a100_2N8G` is for two hosts of eight.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from ntp_plugin.errors import ConfigError

_HOSTS = re.compile(r"(?<![0-9])(\d{1,5})N(\d{1,4})G(?![0-9A-Za-z])")


def words_of(recipe: object, where: str) -> list[str]:
    """Return the command line behind the script, as Megatron-LM's own launcher writes it.

    Args:
        recipe: The content of the file.
        where: The file's name, for errors.

    Raises:
        ConfigError: It is no recipe of this form.
    """
    flags = recipe.get("MODEL_ARGS") if isinstance(recipe, Mapping) else None
    if not isinstance(flags, Mapping):
        raise ConfigError(
            f"{where} has no mapping MODEL_ARGS", fix="MODEL_ARGS: {--num-layers: 12, --sequence-parallel: true}"
        )
    odd = [str(name) for name in flags if not str(name).startswith("--")]
    if odd:
        raise ConfigError(f"{where}: {odd[0]!r} in MODEL_ARGS is no flag", fix=f"--{odd[0].lstrip('-')}")
    return [word for name, value in flags.items() for word in _words(str(name), value)]


def _words(name: str, value: Any) -> Iterator[str]:
    if value is False:
        return
    yield name
    if isinstance(value, list):
        yield from map(str, value)
    elif value is not True and value is not None:
        text = str(value)
        yield from shlex.split(text.strip("[]").replace(", ", " ") if text.startswith("[") else text)


def hosts_in(name: str) -> tuple[int, int] | None:
    """Return (hosts, GPUs of each) as the name of a recipe says, or None if it does not say."""
    found = _HOSTS.search(name)
    return (int(found[1]), int(found[2])) if found else None
