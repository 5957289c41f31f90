"""Reads the `ntp` block of a DeepSpeed configuration, checked like everywhere else; an error names `ntp.<key>`.

A script that builds its configuration itself has no file for the block. Then `ntp run --ntp-deepspeed` gives it, in the
environment of each worker.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

from ntp_plugin.config import schema
from ntp_plugin.config.sections import TrainingPolicy
from ntp_plugin.errors import ConfigError

BLOCK = "ntp"
FROM_COMMAND_LINE = "NTP_DEEPSPEED"
"""Name in the environment: the block as JSON."""


def read_policy(config: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> TrainingPolicy:
    """Return the policy of the block; without a block the plugin is off.

    Raises:
        ConfigError: A key or a value is wrong, or both the configuration and the command line have a block.
    """
    given = environment.get(FROM_COMMAND_LINE)
    if given is not None and BLOCK in config:
        raise ConfigError(
            f"--ntp-deepspeed is given, and the DeepSpeed configuration has a block {BLOCK!r}", fix="leave one out"
        )
    block = config.get(BLOCK, {}) if given is None else json.loads(given)
    return schema.read(TrainingPolicy, block, where=f"{BLOCK}.")
