"""A small job on the plain adapter for tests: a float64 MLP on numbered samples, some of whose ranks die."""

import dataclasses
import time

import torch
import torch.distributed as dist

from ntp_plugin.plain.data_parallel import DataParallel
from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.testing.reference import Trained

STEPS, PER_RANK = 20, 4
_HOOK = 0x7E57


IN_A_STEP = ["between", "backward", "reduce", "after reduce", "vote", "after vote", "apply", "after apply"]
IN_A_COLLECTIVE = ["all_reduce"]
IN_A_RECOVERY = [
    "report",
    "after report",
    "plan",
    "after plan",
    "regroup",
    "address",
    "after address",
    "after regroup",
    "resume",
    "after resume",
]
IN_A_HELPER = ["address", "after address"]
FAULT_POINTS = [*IN_A_STEP, "after backward", *IN_A_COLLECTIVE, *IN_A_RECOVERY]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome(Trained):
    members: tuple[int, ...]
    done_at: dict[int, float]
    """Step -> when it was applied, on the monotonic clock."""


def loss_of(model):
    def loss(step, samples):
        total = torch.zeros((), dtype=torch.float64)
        for sample in samples:
            numbers = torch.Generator().manual_seed(1000 * step + sample)
            x = torch.randn(8, dtype=torch.float64, generator=numbers)
            total = total + (model(x) - x.sin().sum()).square().sum()
        return total

    return loss


def play(rank, steps=STEPS, hold_at=()):
    """Train; `rank.reached` is called at every fault point.

    After each step in `hold_at` the ranks wait until all slots are members again: joining ranks surely get in there.
    """
    torch.manual_seed(0 if not rank.joining else 99)  # a joining rank's own weights must not matter
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
    size = len(rank.first.member_ids)
    elastic = ElasticRank(rank.place)
    groups = elastic.groups
    job = DataParallel(
        model, optimizer, loss_of(model), groups=groups, ranks=size, per_rank=PER_RANK, joiner=rank.joining
    )
    driver = elastic.drive(job)
    attempts = record_samples(job, groups, rank)
    fault(job, driver, rank)
    elastic.start()
    losses, done_at = {}, {}
    while job.applied < steps:
        loss = driver.run_with_recovery(job.step)
        losses[job.applied], done_at[job.applied] = loss, time.monotonic()
        rank.reached("between", job.applied)
        while job.applied in hold_at and len(job.members) < size:
            time.sleep(0.001)
            driver.run_with_recovery(groups.check)
    outcome = Outcome(
        losses=losses,
        weights=[parameter.detach().clone() for parameter in model.parameters()],
        members=job.members,
        attempts={step: attempts[step] for step in range(1, steps + 1) if step in attempts},
        done_at=done_at,
    )
    driver.finish()
    elastic.leave()
    return outcome


def record_samples(job, groups, rank, is_replica_leader=lambda: True):
    """Write down which samples go into which reduction, where a kill cannot take it back; one rank per replica."""
    attempts, reduce = {}, job._reduce

    def recorded(total):
        step = job.applied + 1
        rank.write([[step, groups.epoch, sample] for sample in job.my_samples() if is_replica_leader()])
        result = reduce(total)
        attempts[step] = groups.epoch
        return result

    job._reduce = recorded
    return attempts


def fault(job, driver, rank):
    """Report fault points inside a step, and inside the recovery that leads to an epoch."""
    for name, fault_point in (
        ("_accumulate", "backward"),
        ("_reduce", "reduce"),
        ("_vote", "vote"),
        ("_apply", "apply"),
    ):
        setattr(job, name, _reporting(getattr(job, name), fault_point, rank, lambda: {"step": job.applied + 1}))
    recovery = (
        (driver, "_report", "report"),
        (job, "plan", "plan"),
        (driver, "_regroup", "regroup"),
        (driver._groups._meeting, "set", "address"),
        (job, "resume_from", "resume"),
    )
    for owner, name, fault_point in recovery:
        epoch = lambda: {"epoch": driver._agreement.member.view.epoch}  # noqa: E731
        setattr(owner, name, _reporting(getattr(owner, name), fault_point, rank, epoch))
    dist.group.WORLD.register_post_hook(_HOOK, lambda started: _report_collective(started, rank, job))


def _report_collective(started, rank, job):
    """The operation has started, and no thread waits for it yet."""
    if started.name.name == "ALLREDUCE":
        rank.reached("all_reduce", job.applied + 1)


def _reporting(function, fault_point, rank, number):
    def reporting(*args):
        at = number()
        rank.reached(fault_point, **at)
        result = function(*args)
        rank.reached(f"after {fault_point}", **at)
        return result

    return reporting
