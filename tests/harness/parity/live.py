"""Run Megatron's own pretrain live in ranks of the harness, as `ntp run` starts it, while some ranks die."""

import dataclasses
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ntp_plugin.recovery.fault_points import FAULT_POINTS
from ntp_plugin.testing.faults import Fault
from ntp_plugin.testing.ranks import Rank
from tests.harness.parity.job import RECIPES, Job, Looker, Seen, have_megatron_imported, run_script
from tests.harness.played_ranks import Asking, asking_of, played, quietly, report_request, wait_until_they_ask


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lived:
    """Results of one rank of a live run."""

    seen: Seen
    epoch: int
    width: int


type Rows = list[list[Any]]


def live(
    job: Job,
    *,
    faults: Sequence[Fault] = (),
    back: Mapping[int, int] | None = None,
    leaving: Sequence[int] = (),
) -> tuple[dict[int, Lived], Rows]:
    """Results of the surviving ranks, and the samples of each attempt: ["drawn", step, epoch, sample]. `leaving`: slots
    that end with an error, and return nothing. `back`: slots that restart after their death, and the section at which
    the others wait until they ask."""
    back = back or {}
    have_megatron_imported(job.words, dtype=job.dtype)
    return played(
        job.processes,
        Play(job, asking_of(back)),
        faults=faults,
        fault_points=FAULT_POINTS,
        back=back,
        leaving=leaving,
    )


@dataclasses.dataclass(frozen=True)
class Play:
    """The program of a rank, in a process of its own."""

    job: Job
    asking: Asking = dataclasses.field(default_factory=Asking)

    def __call__(self, rank: Rank) -> Lived:
        return quietly(rank.slot, functools.partial(self._play, rank))

    def _play(self, rank: Rank) -> Lived:
        os.environ |= rank.environment(per_host=self.job.per_host)
        os.environ |= {"NTP_COPIES": self.job.copies} if self.job.copies else {}
        from ntp_plugin.megatron import activation, cpu_emulation  # noqa: PLC0415  (only ranks know Megatron: it warns of much)
        from ntp_plugin.megatron.live import start  # noqa: PLC0415

        mode = cpu_emulation.FLOAT64 if self.job.dtype == "float64" else cpu_emulation.ON
        cpu_emulation.install(mode, self.job.words)
        activation.install()
        looker = Looker(self.job)
        report_fault_points(rank, self.asking)
        recipe = str(self.job.recipe)
        sys.argv = [recipe, *self.job.words, "--data-cache-path", f"{rank.folder}/samples"]
        sys.path[0] = str(RECIPES)
        run_script(recipe)
        assert start.Jobs.now is not None, "it was a live job"
        trainer = start.Jobs.now.trainer
        lived = Lived(
            seen=looker.seen(),
            epoch=start.Jobs.now.rank.groups.epoch,
            width=trainer.layout(trainer.lost).width,
        )
        start.end()
        return lived


def report_fault_points(rank: Rank, asking: Asking) -> None:
    """Report every fault point to the rank: those of a step by its number, those of a recovery by its epoch."""
    from ntp_plugin.megatron.live import fault_points, start  # noqa: PLC0415

    begin = start.MegatronJob.__init__

    def reporting_init(job: Any, *args: Any) -> None:
        begin(job, *args)
        fault_points.report_steps(job, rank.reached)
        _record_samples(rank, job)
        if rank.joining:  # it is driven later
            job.rank.drive = _then_report_recoveries(rank, job, job.rank.drive)
        else:
            fault_points.report_recoveries(job, rank.reached)
        _wait_for_joining_ranks(rank, job, asking)

    setattr(start.MegatronJob, "__init__", reporting_init)  # noqa: B010


def _then_report_recoveries(rank: Rank, job: Any, drive: Any) -> Any:
    def driven(trainer: Any) -> Any:
        from ntp_plugin.megatron.live import fault_points  # noqa: PLC0415

        job.driver = drive(trainer)
        fault_points.report_recoveries(job, rank.reached)
        return job.driver

    return driven


def _wait_for_joining_ranks(rank: Rank, job: Any, asking: Asking) -> None:
    begin = job.step._begin

    def wait_and_begin(*args: Any, **kwargs: Any) -> Any:
        wait_until_they_ask(rank, asking, lambda: job.loop.done + 1, job.rank.groups.check)
        return begin(*args, **kwargs)

    job.step._begin = wait_and_begin
    report_request(rank, asking, job.rank._agreeing)


def as_if_always_there(lived: Mapping[int, Lived]) -> dict[int, Seen]:
    """Fill the steps that a joining rank missed with those of the others."""
    kinds = ("norms", "losses", "steps_with_loss")
    longest = {what: max((getattr(one.seen, what) for one in lived.values()), key=len) for what in kinds}
    seen = {}
    for slot, one in lived.items():
        missing = len(longest["norms"]) - len(one.seen.norms)
        filled: dict[str, Any] = {"norms": [*longest["norms"][:missing], *one.seen.norms]}
        for what in ("losses", "steps_with_loss") if one.seen.losses else ():
            filled[what] = [*longest[what][:missing], *getattr(one.seen, what)]
        seen[slot] = dataclasses.replace(one.seen, **filled)
    return seen


def _record_samples(rank: Rank, job: Any) -> None:
    """Write down which samples a rank draws, where a kill cannot take it back; the first of a TP group draws."""
    from megatron.core.datasets.gpt_dataset import MockGPTDataset  # noqa: PLC0415

    item = MockGPTDataset.__getitem__

    def drawn(dataset: Any, index: Any) -> Any:
        if job.loop.inside and dataset is job.samples._sets[0]:
            step = job.trainer.copies.state_of + 1 if job.step._again else job.loop.done + 1
            rank.write([["drawn", int(step), job.rank.groups.epoch, int(index)]])
        return item(dataset, index)

    MockGPTDataset.__getitem__ = drawn
