"""Answers a framework's start-up collectives in a process that replaces a lost one and starts alone.

Frameworks start up with all ranks together: Megatron asks for the earliest of their clocks and waits for rank 0 to
build a cache; DeepSpeed broadcasts the model. A joining rank is alone, and the others have done all that. Until it is
admitted, every collective that it calls returns as if all ranks had sent what it sends itself. Its process groups are
made, and are connected when it joins, between two steps.
"""

import functools
import inspect
import logging
import os
from typing import Any

import torch

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
            if self.over:
                return original(*args, **kwargs)
            return _completed() if _is_asynchronous(original, args, kwargs) else None

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


def _is_asynchronous(collective: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the caller waits for a handle."""
    given = inspect.signature(collective).bind(*args, **kwargs).arguments
    return bool(given.get("async_op", False))


def _completed() -> Any:
    """Return the handle of a collective that is over."""
    over: Any = torch.futures.Future()
    over.set_result(None)
    return torch._C._distributed_c10d._create_work_from_future(over)
