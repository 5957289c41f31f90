"""What becomes of all that a DeepSpeed job with ZeRO has, where state comes from copies.

After a loss what nobody steps comes from a rank that is left. Who resumes has copies alone: then it is what the script
has made of it, which may not be what the dead run had.
"""

import logging
from collections.abc import Iterator
from typing import Any

from ntp_plugin.copies.inventory import EXACT, LEFT, RECOMPUTE, RESET, Item, require_known
from ntp_plugin.deepspeed.engine_counters import count
from ntp_plugin.deepspeed.flat_shards import kind_of
from ntp_plugin.training import optimizers

_LOG = logging.getLogger(__name__)

INVENTORY = (
    Item(pattern="weight *", becomes=RECOMPUTE, why="what is stepped, rounded"),
    Item(pattern="main weights", becomes=EXACT, why="copied: what is stepped"),
    *optimizers.INVENTORY,
    Item(pattern="counted *", becomes=EXACT, why="told with each copy"),
    Item(pattern="drawn from torch", becomes=RESET, why="a rank's own, which has it again; who resumes draws anew"),
    Item(pattern="the weight *, which nobody steps,", becomes=LEFT, why="handed on by a rank that is left"),
    Item(pattern="the buffer *", becomes=LEFT, why="handed on by a rank that is left"),
)
"""By the names of `_found`. Gradients, and what a window has in flight, are taken again."""


def known(*, resumes: bool) -> list[Item]:
    """What becomes of it after a loss, or for who resumes."""
    return [item for item in INVENTORY if not (resumes and item.becomes == LEFT)]


def refuse_unknown(engine: Any, *, strict: bool, resumes: bool = False) -> None:
    """State of which nobody knows what becomes of it."""
    for name in require_known(_found(engine), known(resumes=resumes), strict=strict, way_out=_way_out(resumes=resumes)):
        _LOG.warning("copies: %s is not copied", name)


def _way_out(*, resumes: bool) -> str:
    if resumes:
        return "ntp.copies.strict = false: it is what the script has made of it; or load the last checkpoint"
    return "ntp.copies.strict = false: it keeps what it has by then, on ranks that are left"


def _found(engine: Any) -> Iterator[str]:
    yield "main weights"
    yield "drawn from torch"
    yield from optimizers.kept(engine.basic_optimizer)
    yield from (f"counted {name}" for name in count(engine))
    module, zero = engine.module, engine.optimizer
    stepped = {id(parameter) for group in kind_of(zero).parameters(zero) for parameter in group}
    for name, parameter in module.named_parameters():
        yield f"weight {name}" if id(parameter) in stepped else f"the weight {name}, which nobody steps,"
    persistent = module.state_dict()
    yield from (f"the buffer {name}" for name, value in module.named_buffers() if name in persistent and value.numel())
