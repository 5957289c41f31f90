"""Run many seeds; a failure reports its seed, and the command that replays it."""

import dataclasses
from collections.abc import Iterable

from ntp_plugin.simulator.protocol.job import RunOutcome, VirtualJob
from ntp_plugin.simulator.protocol.laws import Violation
from ntp_plugin.simulator.protocol.rules import rules_of
from ntp_plugin.simulator.protocol.schedule import draw


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BrokenLaw:
    """A seed whose schedule breaks a law."""

    seed: int
    law: str
    planted: str | None

    @property
    def replay(self) -> str:
        """The command that shows it again."""
        return f"ntp simulate --replay {self.seed}" + (f" --planted {self.planted}" if self.planted else "")

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.law}\n  replay: {self.replay}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Searched:
    """What came of some seeds."""

    seeds: int
    events: int
    epochs: int
    faults: int
    found: BrokenLaw | None


def replay(seed: int, planted: str | None = None) -> RunOutcome:
    """One run; raises `Violation`."""
    return VirtualJob(draw(seed), rules_of(planted)).run()


def search(seeds: Iterable[int], planted: str | None = None) -> Searched:
    """Run after run, up to the first that breaks a law."""
    count, events, epochs, faults = 0, 0, 0, 0
    for seed in seeds:
        count += 1
        try:
            outcome = replay(seed, planted)
        except Violation as law:
            found = BrokenLaw(seed=seed, law=str(law), planted=planted)
            return Searched(seeds=count, events=events, epochs=epochs, faults=faults, found=found)
        events, epochs, faults = events + outcome.events, epochs + outcome.epochs, faults + outcome.faults
    return Searched(seeds=count, events=events, epochs=epochs, faults=faults, found=None)
