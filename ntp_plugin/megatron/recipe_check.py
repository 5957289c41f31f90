"""Finds the options of a Megatron command line that a live job does not support, without a model or other ranks."""

import argparse
import contextlib
import functools
import io
from collections.abc import Sequence
from typing import Any

import torch

from ntp_plugin.errors import ConfigError
from ntp_plugin.megatron import activation, cpu_emulation
from ntp_plugin.megatron.checkpoint_arguments import read_checkpoint_arguments
from ntp_plugin.megatron.option_checks import unsupported_live
from ntp_plugin.planning.job_check import UnsupportedOption


def check(flags: Sequence[str]) -> tuple[UnsupportedOption, ...]:
    """`ntp_plugin.megatron.check`, whose docstring is the one to read."""
    arguments, _ = parsed(flags)
    read_checkpoint_arguments(arguments)
    policy = activation.read_policy(arguments)
    return tuple(unsupported_live(arguments, policy)) if policy.enabled else ()


def parsed(flags: Sequence[str]) -> tuple[Any, list[str]]:
    """Return the arguments as Megatron's parser reads them, before Megatron checks them, and the words that it does not
    know: a script may have flags of its own.

    Raises:
        ConfigError: The parser refuses the flags.
    """
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            return parser().parse_known_args(list(flags))
    except SystemExit:
        error = output.getvalue().strip().rpartition("error: ")[2]
        raise ConfigError(f"Megatron's parser refuses the flags: {error}", fix="mend them first") from None


@functools.cache
def parser() -> argparse.ArgumentParser:
    """Megatron's parser with the plugin's flags. Without a GPU, Megatron is imported under the CPU emulation."""
    if not torch.cuda.is_available():
        cpu_emulation.install(cpu_emulation.ON)
    activation.install()
    from megatron.training.arguments import add_megatron_arguments  # noqa: PLC0415  (after the emulation)

    made: argparse.ArgumentParser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return made
