"""Shared code of live runs of loops that Hugging Face's libraries drive, or help to: the program of a rank."""

import dataclasses
import functools
import importlib
import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from ntp_plugin.testing.faults import Fault
from ntp_plugin.testing.ranks import Rank
from tests.harness.played_ranks import Asking, asking_of, played, quietly
from tests.harness.zero.job import emulate_in_float64


@dataclasses.dataclass(frozen=True)
class PlayedLoop:
    """The program of a rank, in a process of its own."""

    job: Any
    asking: Asking = dataclasses.field(default_factory=Asking)

    hooks: ClassVar[str]
    """The module that installs the plugin's hooks for the loop."""

    def train(self, rank: Rank, folder: str) -> Any:
        """Run the script, and return what the rank has at the end of it."""
        raise NotImplementedError

    def __call__(self, rank: Rank) -> Any:
        return quietly(rank.slot, functools.partial(self._play, rank))

    def _play(self, rank: Rank) -> Any:
        os.environ |= rank.environment()
        import ntp_plugin.deepspeed.activation as ours  # noqa: PLC0415  (only ranks have DeepSpeed with hooks in it)
        from ntp_plugin.launch import accelerate_on_cpu  # noqa: PLC0415

        accelerate_on_cpu.install()
        importlib.import_module(self.hooks).install()
        if self.job.dtype == "float64":
            emulate_in_float64()
        with tempfile.TemporaryDirectory() as folder:
            seen = self.train(rank, self.job.folder or folder)
            ours.end()
        return seen


def run_loop(
    job: Any,
    play: Callable[[Any, Asking], PlayedLoop],
    *,
    preload: str,
    fault_points: Collection[str],
    faults: Sequence[Fault] = (),
    back: Mapping[int, int] | None = None,
    leaving: Sequence[int] = (),
) -> tuple[dict[int, Any], list[list[Any]]]:
    """Results of the surviving ranks, and what they wrote.

    Args:
        job: What the ranks run.
        play: Makes their program.
        preload: Modules that the fork server imports before the first rank.
        fault_points: All that the ranks report.
        faults: The injected faults.
        back: Slots that restart after their death, and the step at which the others wait until they ask.
        leaving: Slots that end with an error.
    """
    os.environ["NTP_PRELOAD"] = preload
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    back = back or {}
    program = play(job, asking_of(back))
    return played(job.ranks, program, faults=faults, fault_points=fault_points, back=back, leaving=leaving)
