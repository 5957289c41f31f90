"""What the training of a rank of an ordinary PyTorch loop depends on (`recovery/same_settings.py`)."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ntp_plugin.plain.voted_step import VotedStep
from ntp_plugin.recovery import fingerprint as fp
from ntp_plugin.recovery import same_settings
from ntp_plugin.recovery.fingerprint import Fingerprint

_OF_THE_STATE = {"params", "lr", "initial_lr", "momentum", "betas"}
"""What a schedule changes in an optimizer's groups while it trains: a joining rank has it from the others, whatever a
checkpoint that its script has loaded says."""


def of(trainer: VotedStep, settings: Mapping[str, Any]) -> Fingerprint:
    """The script and its words, how the job was set up, the model and its optimizer.

    A script's samples are made by its own code, so its data are compared as far as its words and its file name them.
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
