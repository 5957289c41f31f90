"""Installs the hooks, unless DeepSpeed or torch has other functions than those that the plugin was tested with.

This comes before the rest of the adapter is imported, because that imports the names which may be missing. With changed
functions nothing is replaced but the engine's constructor, which then refuses a configuration that enables the plugin.
Any other job runs as it would without the plugin.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import deepspeed.runtime.engine  # noqa: F401  (imports the modules whose functions are compared)

from ntp_plugin.deepspeed.settings import read_policy
from ntp_plugin.errors import Refused, in_one_line
from ntp_plugin.patching import Replacement, apply_all
from ntp_plugin.tested_versions.comparison import refusal, require_present

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine.__init__"


class _Changed:
    is_refused = False


def install(*, late_is_refused: bool = False) -> None:
    """Install the hooks for the rest of this process; a second call does nothing.

    Args:
        late_is_refused: Whether to raise where the process group is made already.
    """
    if _Changed.is_refused:
        return
    require_present([_ENGINE])
    error = None if "ntp_plugin.deepspeed.activation" in sys.modules else refusal("deepspeed")
    if error is None:
        importlib.import_module("ntp_plugin.deepspeed.activation").install(late_is_refused=late_is_refused)
        return
    _Changed.is_refused = True
    sys.excepthook = in_one_line(sys.excepthook)
    apply_all([_refusing(error)])


def _refusing(error: Refused) -> Replacement:
    def refusing(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def build(engine: Any, *args: Any, **kwargs: Any) -> None:
            if read_policy(getattr(kwargs.get("config_class"), "_param_dict", {})).enabled:
                raise error
            original(engine, *args, **kwargs)

        return build

    return Replacement(
        target=_ENGINE, why="the configuration is known here, and functions of DeepSpeed have changed", make=refusing
    )
