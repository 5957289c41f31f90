"""A process that takes the place of a lost one: it starts like any other, by itself, and comes in between two steps.

Frameworks start up with all ranks together: Megatron asks for the earliest of their clocks and waits for rank 0 to
build a cache, DeepSpeed broadcasts the model. A joining rank is alone, and the others have done all that. So until it
is let in, whatever it asks of all is answered as if everybody had said what it says itself; its groups are made, and
connected when it comes in.
"""

import functools
import logging
import os
from typing import Any

from ntp_plugin.patching import Replacement

_LOG = logging.getLogger(__name__)


class Alone:
    """Answers for collectives, until it is over."""

    def __init__(self) -> None:
        self.over = False

    def table(self) -> tuple[Replacement, ...]:
        """What is answered."""
        unchanged = ("barrier", "all_reduce", "broadcast", "broadcast_object_list")
        why = "there is nobody to ask before this process is let in"
        return (
            *(Replacement(target=f"torch.distributed:{name}", why=why, make=self._unchanged) for name in unchanged),
            Replacement(
                target="torch:save",
                why="what the script writes on its way to the job was written, and not of weights that nobody trained",
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
            _LOG.warning("not written: %s, by a process that is not in the job yet", to)
            return None

        return save

    def _everybody_says_the_same(self, original: Any) -> Any:
        @functools.wraps(original)
        def ask(told: list[Any], mine: Any, *args: Any, **kwargs: Any) -> Any:
            if self.over:
                return original(told, mine, *args, **kwargs)
            told[:] = [mine] * len(told)
            return None

        return ask
