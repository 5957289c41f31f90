"""What becomes of every part of a job's state. PURE.

    exact        it is copied, and comes back bit for bit
    recompute    it follows from what is exact
    reset        it begins anew, and that changes nothing of the training
    left         it comes from a surviving process; a run that begins from copies alone has none of it
    none         there is none, and a job that would have some is refused

An adapter lists what it knows, and what it finds in the user's model and optimizer. State that is found but not known
would be lost in silence. So it is refused at start, by its name, unless the user says that it may be reset.
"""

import dataclasses
import fnmatch
from collections.abc import Iterable, Sequence

from ntp_plugin.errors import Refused

EXACT, RECOMPUTE, RESET, LEFT, NONE = "exact", "recompute", "reset", "left", "none"
_FIX = "--no-ntp-copies-strict: surviving ranks keep their value of it"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """Parts of the state whose names fit a pattern."""

    pattern: str
    becomes: str
    why: str


def require_known(found: Iterable[str], known: Sequence[Item], *, strict: bool, fix: str = _FIX) -> list[str]:
    """Return the found state that no known item covers; raises `Refused` if there is some and `strict` is set."""
    unknown = [name for name in found if not any(fnmatch.fnmatchcase(name, item.pattern) for item in known)]
    if unknown and strict:
        more = f", and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise Refused(
            f"the plugin does not know {unknown[0]}{more}: lost when the state comes from copies",
            fix=fix,
        )
    return unknown
