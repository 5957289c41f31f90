"""A row of a table of unsupported options, and the usual ways to write one. PURE."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """One unsupported option: when it applies, why, and what to do instead."""

    flag: str
    applies: Callable[[Any], object]
    why: str
    fix: str


def above(name: str, bound: float = 1) -> Callable[[Any], bool]:
    """Whether an argument is larger than a bound."""
    return lambda args: (getattr(args, name, None) or 0) > bound


def given(name: str) -> Callable[[Any], object]:
    """Whether an argument is given."""
    return lambda args: getattr(args, name, None)


def not_built(flag: str, applies: Callable[[Any], object] | None = None, *, fix: str = "") -> Refusal:
    """Refuse something that could work, and is not built yet."""
    return Refusal(
        flag=flag,
        applies=applies or given(flag.removeprefix("--").replace("-", "_")),
        why="is not built yet for replicas of different width",
        fix=fix or f"leave {flag} out, or start with full-width replicas",
    )


def not_planned(flag: str, applies: Callable[[Any], object]) -> Refusal:
    """Refuse something that works when a running job loses a slot, and not yet in a job that begins without one."""
    return Refusal(
        flag=flag,
        applies=applies,
        why="is not built yet",
        fix="start all slots, by ntp run and without --ntp-lost",
    )
