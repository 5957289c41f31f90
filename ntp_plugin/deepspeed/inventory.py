"""How each part of a DeepSpeed job's state is restored from copies, in a job with ZeRO.

After a loss, state that no optimizer steps comes from a surviving rank. A resumed run has only copies: then it is what
the script has made of it, which may differ from the dead run's.
"""

import logging
from collections.abc import Iterator
from typing import Any

from ntp_plugin.copies.inventory import EXACT, LEFT, RECOMPUTE, RESET, Item, require_known
from ntp_plugin.deepspeed.engine_counters import count
from ntp_plugin.deepspeed.flat_shards import kind_of
from ntp_plugin.deepspeed.sharded_weights import is_sharded
from ntp_plugin.training import optimizers

_LOG = logging.getLogger(__name__)

INVENTORY = (
    Item(pattern="weight *", becomes=RECOMPUTE, why="what is stepped, rounded"),
    Item(pattern="main weights", becomes=EXACT, why="copied: what is stepped"),
    *optimizers.INVENTORY,
    Item(pattern="counted *", becomes=EXACT, why="recorded with each copy"),
    Item(pattern="drawn from torch", becomes=RESET, why="restored on its own rank; a resumed run draws anew"),
    Item(pattern="slice of the weight *", becomes=EXACT, why="copied: what is stepped for it, or the slice itself"),
    Item(pattern="the weight *, which nobody steps,", becomes=LEFT, why="sent by a surviving rank"),
    Item(pattern="the buffer *", becomes=LEFT, why="sent by a surviving rank"),
)
"""By the names of `_found`. Gradients, and what an accumulation window has in flight, are computed again."""


def known(*, resumes: bool) -> list[Item]:
    """Return how each part is restored: after a loss, or for a run that resumes."""
    return [item for item in INVENTORY if not (resumes and item.becomes == LEFT)]


def refuse_unknown(engine: Any, *, strict: bool, resumes: bool = False) -> None:
    """Raise, or warn, if the job has state that the inventory does not cover."""
    for name in require_known(_found(engine), known(resumes=resumes), strict=strict, fix=_fix(resumes=resumes)):
        _LOG.warning("copies: %s is not copied", name)


def _fix(*, resumes: bool) -> str:
    if resumes:
        return "ntp.copies.strict = false: it is what the script has made of it; or load the last checkpoint"
    return "ntp.copies.strict = false: surviving ranks keep what they have by then"


def _found(engine: Any) -> Iterator[str]:
    yield "main weights"
    yield "drawn from torch"
    yield from optimizers.kept(engine.basic_optimizer)
    yield from (f"counted {name}" for name in count(engine))
    module, zero = engine.module, engine.optimizer
    stepped = {id(parameter) for group in kind_of(zero).parameters(zero) for parameter in group}
    for name, parameter in module.named_parameters():
        if is_sharded(parameter):
            yield f"slice of the weight {name}"
        else:
            yield f"weight {name}" if id(parameter) in stepped else f"the weight {name}, which nobody steps,"
    persistent = module.state_dict()
    yield from (f"the buffer {name}" for name, value in module.named_buffers() if name in persistent and value.numel())
