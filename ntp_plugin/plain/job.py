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
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ntp_plugin.comm.agreement import Agreement
from ntp_plugin.comm.process_groups import ElasticGroups
from ntp_plugin.comm.store import TorchStore
from ntp_plugin.errors import NtpError
from ntp_plugin.plain.data_parallel import DataParallel, LossOfSamples
from ntp_plugin.recovery.driver import Driver
from ntp_plugin.recovery.heartbeat import Heart, HeartbeatFile
from ntp_plugin.recovery.place import MEMBERSHIP, Place


class ElasticJob:
    """One rank of a job, between its losses."""

    def __init__(self, trainer: DataParallel, driver: Driver, groups: ElasticGroups) -> None:
        self._trainer, self._driver, self._groups = trainer, driver, groups

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
    # Three connections, one for each thread that uses one, all opened now and none while recovering.
    stores = [TCPStore(place.store_host, place.store_port, None, False) for _ in range(3)]
    membership, watched = (TorchStore(PrefixStore(MEMBERSHIP, store)) for store in stores[:2])
    groups = ElasticGroups(place.slot, joining=place.joining)
    groups.attach()
    rendezvous = PrefixStore("ntp/c10d", stores[2])
    dist.init_process_group("gloo", store=rendezvous, rank=place.slot, world_size=place.slots, timeout=timeout)
    trainer = DataParallel(
        model,
        optimizer,
        loss_of,
        groups=groups,
        ranks=place.slots,
        per_rank=per_rank,
        micro_batch=micro_batch,
        newcomer=place.joining,
    )
    joined = Agreement.joining if place.joining else Agreement.founding
    agreement = joined(membership, place.first_view, place.seat)
    driver = Driver(agreement=agreement, watched=watched, groups=groups, trainer=trainer)
    heart = Heart(HeartbeatFile(place.heartbeats, place.slots), place.slot, every_s=place.beat_s, moved=groups.moved)
    heart.start()
    try:
        driver.start()
        yield ElasticJob(trainer, driver, groups)
    except NtpError as error:
        print(f"ntp: slot {place.slot}: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    finally:
        driver.stop()
        heart.stop()
        groups.detach()
