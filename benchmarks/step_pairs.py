"""Compare steps with and without the plugin in pairs: the result of one job, and a row from several jobs.

A pair is two consecutive steps, in the order on-off, off-on, and so on.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.overhead import interval, row

WARM_UP = 6

type Pair = tuple[float, float]
"""Seconds of the step with the plugin, and of the other."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """Results of one job."""

    seconds: list[Pair]
    computing: list[Pair]
    """Of the same pairs; zeros where it is not known."""
    threads: float
    """Of all processors' time, what our threads took."""


def is_first(step: int) -> bool:
    """Return whether this step, which has the plugin in, is the first of its pair: pairs alternate."""
    pair, place = divmod(step, 2)
    return place == pair % 2


def pairs_of(steps: Sequence[float]) -> list[Pair]:
    """Pair the values of consecutive steps."""
    counted = steps[WARM_UP:]
    pairs = zip(counted[::2], counted[1::2], strict=False)
    return [(one, other) if is_first(WARM_UP + 2 * at) else (other, one) for at, (one, other) in enumerate(pairs)]


def apart_from_computing(seconds: Sequence[Pair], computing: Sequence[Pair]) -> list[float]:
    """One plus the additional time of each step with the plugin, without computing, as a share of a step."""
    whole = statistics.median(without for _, without in seconds)
    left = [(on - own_on, off - own_off) for (on, off), (own_on, own_off) in zip(seconds, computing, strict=True)]
    return [1 + (mine - other) / whole for mine, other in left]


def row_of(what: str, blocks: Sequence[Block], *, framework: str) -> dict[str, Any]:
    """The row of what some jobs of a kind found, in all of their pairs."""
    seconds = [pair for block in blocks for pair in block.seconds]
    computing = [pair for block in blocks for pair in block.computing]
    found = row(what, _ratios(seconds), framework=framework)
    low, high = interval(_ratios(seconds))
    step_s = statistics.median(without for _, without in seconds)
    found |= {
        "jobs": len(blocks),
        "threads": round(statistics.mean(block.threads for block in blocks), 4),
        "step_ms": round(1000 * step_s, 1),
        "added_ms": round(1000 * step_s * (found["ratio"] - 1), 1),
        "low": low,
        "high": high,
    }
    return found | _apart(seconds, computing) if any(without for _, without in computing) else found


def _apart(seconds: Sequence[Pair], computing: Sequence[Pair]) -> dict[str, Any]:
    """Additional values of a row whose computing is known."""
    apart, same = apart_from_computing(seconds, computing), _ratios(computing)
    low, high = interval(apart)
    return {
        "apart": round(statistics.median(apart), 4),
        "apart_95": f"{low:.4f} to {high:.4f}",
        "computing": f"{statistics.median(same):.4f} ({interval(same)[0]:.4f} to {interval(same)[1]:.4f})",
        "apart_low": low,
        "apart_high": high,
    }


def _ratios(pairs: Sequence[Pair]) -> list[float]:
    return [mine / other for mine, other in pairs]
