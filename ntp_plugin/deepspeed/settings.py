"""Reads the `ntp` block of a DeepSpeed configuration, checked like everywhere else; an error names `ntp.<key>`."""

from collections.abc import Mapping
from typing import Any

from ntp_plugin.config import schema
from ntp_plugin.config.sections import TrainingPolicy

BLOCK = "ntp"


def read_policy(config: Mapping[str, Any]) -> TrainingPolicy:
    """Return the policy of the block; without a block the plugin is off."""
    return schema.read(TrainingPolicy, config.get(BLOCK, {}), where=f"{BLOCK}.")
