"""A job for `ntp run` in an ordinary PyTorch script.

    with elastic_job(model, optimizer, loss_of, per_rank=4) as job:
        while job.steps_done < 1000:
            loss = job.step()

`loss_of(step, samples)` returns the sum of the losses of the numbered samples of a step's global batch; which samples a
rank computes changes with who is alive, and the gradient is always that of the whole batch. A rank that takes the place
of a lost one begins with the others' weights, whatever its own are.
"""

import contextlib
import sys
from collections.abc import Iterator
from datetime import timedelta

import torch

from ntp_plugin.errors import NtpError
from ntp_plugin.plain.data_parallel import DataParallel, LossOfSamples
from ntp_plugin.recovery.driver import Driver
from ntp_plugin.recovery.place import Place
from ntp_plugin.recovery.rank import ElasticRank


class ElasticJob:
    """One rank of a job, between its losses."""

    def __init__(self, trainer: DataParallel, driver: Driver) -> None:
        self._trainer, self._driver = trainer, driver

    @property
    def steps_done(self) -> int:
        """Steps applied so far; for a newcomer, those of the others count."""
        return self._trainer.applied

    @property
    def members(self) -> tuple[int, ...]:
        """The slots that train now."""
        return self._trainer.members

    def step(self) -> float:
        """Take one optimizer step, through whatever losses; returns the mean loss over the global batch."""
        return self._driver.carry_through(self._trainer.step)


@contextlib.contextmanager
def elastic_job(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: LossOfSamples,
    *,
    per_rank: int,
    micro_batch: int = 1,
    timeout: timedelta = timedelta(minutes=30),
) -> Iterator[ElasticJob]:
    """Join the job that `ntp run` started; an error of ours ends the process with one line and its exit code."""
    place = Place.read()
    rank = ElasticRank(place, timeout=timeout)
    trainer = DataParallel(
        model,
        optimizer,
        loss_of,
        groups=rank.groups,
        ranks=place.slots,
        per_rank=per_rank,
        micro_batch=micro_batch,
        newcomer=place.joining,
    )
    try:
        driver = rank.drive(trainer)
        rank.start()
        yield ElasticJob(trainer, driver)
        driver.finish()
    except NtpError as error:
        print(f"ntp: slot {place.slot}: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    finally:
        rank.leave()
