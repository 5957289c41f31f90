"""Answers a framework's start-up collectives in a process that replaces a lost one and starts alone.

Frameworks start up with all ranks together: Megatron asks for the earliest of their clocks and waits for rank 0 to
build a cache; DeepSpeed broadcasts the model. A joining rank is alone, and the others have done all that. Until it is
admitted, every collective that it calls returns as if all ranks had sent what it sends itself. Its process groups are
made, and are connected when it joins, between two steps.
"""

import functools
import logging
import os
from typing import Any

from ntp_plugin.patching import Replacement

_LOG = logging.getLogger(__name__)


class Alone:
    """Answers collectives locally until `over` is set."""

    def __init__(self) -> None:
        self.over = False

    def table(self) -> tuple[Replacement, ...]:
        """The functions to replace."""
        unchanged = ("barrier", "all_reduce", "broadcast", "broadcast_object_list")
        why = "there is nobody to ask before this process is admitted"
        return (
            *(Replacement(target=f"torch.distributed:{name}", why=why, make=self._unchanged) for name in unchanged),
            Replacement(
                target="torch:save",
                why="the job has written these files already, and this process has untrained weights",
                make=self._to_no_file,
            ),
            Replacement(target="torch.distributed:all_gather_object", why=why, make=self._everybody_says_the_same),
        )

    def _unchanged(self, original: Any) -> Any:
        @functools.wraps(original)
        def ask(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if self.over else None

        return ask

    def _to_no_file(self, original: Any) -> Any:
        @functools.wraps(original)
        def save(value: Any, to: Any, *args: Any, **kwargs: Any) -> Any:
            if self.over or not isinstance(to, str | os.PathLike):
                return original(value, to, *args, **kwargs)
            _LOG.warning("not written: %s: this process has not joined the job yet", to)
            return None

        return save

    def _everybody_says_the_same(self, original: Any) -> Any:
        @functools.wraps(original)
        def ask(gathered: list[Any], mine: Any, *args: Any, **kwargs: Any) -> Any:
            if self.over:
                return original(gathered, mine, *args, **kwargs)
            gathered[:] = [mine] * len(gathered)
            return None

        return ask
