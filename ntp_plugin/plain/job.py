"""A job for `ntp run` in an ordinary PyTorch script.

    with elastic_job(model, optimizer, loss_of, per_rank=4) as job:
        while job.steps_done < 1000:
            loss = job.step()

`loss_of(step, samples)` returns the sum of the losses of the numbered samples of a step's global batch; which samples a
rank computes changes with who is alive, and the gradient is always that of the whole batch. A rank that takes the place
of a lost one begins with the others' weights, whatever its own are.

A model whose layers are cut over several ranks says so, and is built for the place that this process has:

    with tensor_parallel_job(build, loss_of, tp=2, per_replica=8) as job: ...

`build(group)` returns the model, made of `ColumnParallel` and `RowParallel` layers in that group, and its optimizer;
`loss_of(model, step, samples)` is as above.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch

from ntp_plugin.errors import NtpError
from ntp_plugin.plain.data_parallel import DataParallel
from ntp_plugin.plain.parallel_layers import TensorParallelGroup
from ntp_plugin.plain.tensor_parallel import TensorParallel
from ntp_plugin.plain.voted_step import LossOfSamples, Samples
from ntp_plugin.recovery.driver import Driver
from ntp_plugin.recovery.place import Place
from ntp_plugin.recovery.rank import ElasticRank


class ElasticJob:
    """One rank of a job, between its losses."""

    def __init__(self, trainer: DataParallel | TensorParallel, driver: Driver) -> None:
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

    def trainer(rank: ElasticRank) -> DataParallel:
        return DataParallel(
            model,
            optimizer,
            loss_of,
            groups=rank.groups,
            ranks=rank.place.slots,
            per_rank=per_rank,
            micro_batch=micro_batch,
            newcomer=rank.place.joining,
        )

    with _driven(trainer, timeout) as job:
        yield job


type Build = Callable[[TensorParallelGroup], tuple[torch.nn.Module, torch.optim.Optimizer]]
type LossOfModel = Callable[[torch.nn.Module, int, Samples], torch.Tensor]


@contextlib.contextmanager
def tensor_parallel_job(
    build: Build,
    loss_of: LossOfModel,
    *,
    tp: int,
    per_replica: int,
    micro_batch: int = 1,
    min_width: int = 1,
    timeout: timedelta = timedelta(minutes=30),
) -> Iterator[ElasticJob]:
    """The same for replicas of `tp` ranks each; one that is left with fewer than `min_width` stands idle."""

    def trainer(rank: ElasticRank) -> TensorParallel:
        group = TensorParallelGroup(rank.place.slot % tp, tp)
        model, optimizer = build(group)
        return TensorParallel(
            model,
            optimizer,
            lambda step, samples: loss_of(model, step, samples),
            groups=rank.groups,
            within=group,
            ranks=rank.place.slots,
            per_replica=per_replica,
            micro_batch=micro_batch,
            min_width=min_width,
            newcomer=rank.place.joining,
        )

    with _driven(trainer, timeout) as job:
        yield job


@contextlib.contextmanager
def _driven(make: Callable[[ElasticRank], DataParallel | TensorParallel], timeout: timedelta) -> Iterator[ElasticJob]:
    place = Place.read()
    rank = ElasticRank(place, timeout=timeout)
    try:
        trainer = make(rank)
        driver = rank.drive(trainer)
        rank.start()
        yield ElasticJob(trainer, driver)
        driver.finish()
    except NtpError as error:
        print(f"ntp: slot {place.slot}: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    finally:
        rank.leave()
