"""Collects the settings on which a rank's training depends, for the comparison of all ranks
(`recovery/same_settings.py`)."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ntp_plugin.plain.voted_step import VotedStep
from ntp_plugin.recovery import fingerprint as fp
from ntp_plugin.recovery import same_settings
from ntp_plugin.recovery.fingerprint import Fingerprint

_OF_THE_STATE = {"params", "lr", "initial_lr", "momentum", "betas"}
"""Values in an optimizer's groups that a schedule changes during training. A joining rank gets them from the others,
whatever checkpoint its script has loaded."""


def of(trainer: VotedStep, settings: Mapping[str, Any]) -> Fingerprint:
    """Return the fingerprint of a rank: the script and its arguments, the settings of the job, model and optimizer.

    A script's own code makes its samples, so the data are compared only as far as its file and its arguments name them.
    """
    words = {**same_settings.arguments_of_script(), **fp.in_words(settings), **dict(_optimizer(trainer.optimizer))}
    found = same_settings.settings(words, {}, framework={})
    of_model = {f"model of {trainer.place}": same_settings.described(dict(trainer.model.named_parameters()))}
    return Fingerprint(sections={**found.sections, **of_model})


def _optimizer(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str]]:
    yield "optimizer", type(optimizer).__qualname__
    for number, group in enumerate(optimizer.param_groups):
        values = {name: value for name, value in group.items() if name not in _OF_THE_STATE}
        yield from fp.in_words({f"group {number}": values}).items()
