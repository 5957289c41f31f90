"""A small job on the tensor-parallel trainer for tests: a float64 MLP, two replicas, some of whose slots die."""

import dataclasses
import time

import torch

from ntp_plugin.groups.gloo_backend import GlooBackend
from ntp_plugin.plain.parallel_layers import TensorParallelGroup, TensorParallelMLP
from ntp_plugin.plain.tensor_parallel import TensorParallel
from ntp_plugin.planning import spans as sp
from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.resharding import reshard_plan
from ntp_plugin.resharding.cuts import local_ranges
from tests.ranks.plain_job import fault, loss_of, record_samples

STEPS, PER_REPLICA, HIDDEN = 12, 6, 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    losses: dict[int, float]
    units: dict[tuple[str, str, int], torch.Tensor]
    """(tensor, entry, unit) -> its values; the unit of a replicated tensor is 0."""
    shapes: dict[str, tuple[int, ...]]
    holdings: dict[str, tuple]
    """Tensor -> its units in storage order."""
    members: tuple[int, ...]
    attempts: dict[int, int]


def play(rank, tp=2, steps=STEPS, hold_at=(), min_width=1):
    """Train; `rank.reached` is called at every fault point.

    After each step in `hold_at` the ranks wait until all slots are members again: joining ranks surely get in there.
    """
    reshard_plan.LEAST = 0  # so that a move takes several batches
    torch.manual_seed(0 if not rank.joining else 99)  # a joining rank's own weights must not matter
    torch.set_default_dtype(torch.float64)
    within = TensorParallelGroup(rank.slot % tp, tp)
    model = TensorParallelMLP(8, 6, HIDDEN, 1, within)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
    parameters = list(model.parameters())
    size = len(rank.first.member_ids)
    elastic = ElasticRank(rank.place)
    job = TensorParallel(
        model,
        optimizer,
        loss_of(model),
        groups=elastic.groups,
        within=within,
        ranks=size,
        per_replica=PER_REPLICA,
        min_width=min_width,
        joiner=rank.joining,
    )
    driver = elastic.drive(job)
    attempts = record_samples(job, elastic.groups, rank, is_replica_leader=lambda: job.counts)
    fault(job, driver, rank)
    damage_tensors(job, rank)
    damage_lanes(elastic.groups, rank)
    elastic.start()
    losses = {}
    while job.applied < steps:
        loss = driver.run_with_recovery(job.step)
        losses[job.applied] = loss
        rank.reached("between", job.applied)
        while job.applied in hold_at and len(job.members) < size:
            time.sleep(0.001)
            driver.run_with_recovery(elastic.groups.check)
    assert all(mine is theirs for mine, theirs in zip(parameters, model.parameters(), strict=True))
    outcome = Outcome(
        losses=losses,
        units=units(job),
        shapes={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        holdings={tensor.name: job._plan.units_of(tensor, job.slot) for tensor in tensors_of(job)},
        members=job.members,
        attempts={step: attempts[step] for step in range(1, steps + 1) if step in attempts},
    )
    driver.finish()
    elastic.leave()
    return outcome


def damage_tensors(job, rank):
    """Report fault points inside the first resharding: its k-th tensor is built, compared, or switched to."""
    state, count, switched = job.state, 0, 0
    build, switch = state.build, state._switch

    def reporting_build(*args):
        nonlocal count
        count += 1
        rank.reached("build", count)
        build(*args)

    def reporting_switch(*args):
        nonlocal switched
        switched += 1
        rank.reached("switch", switched)
        switch(*args)
        rank.reached("after switch", switched)

    state.build, state._switch = reporting_build, reporting_switch


def damage_lanes(groups, rank):
    """Report fault points before and after the first lane of an epoch is connected."""
    make, edit = groups.make_lanes, GlooBackend.edit
    connected = 0

    def reporting_make(*args, **options):
        nonlocal connected
        rank.reached("make lanes", epoch=groups.epoch)
        connected = 0
        return make(*args, **options)

    def reporting_edit(backend, *args):
        nonlocal connected
        edit(backend, *args)
        connected += 1
        if connected == 1 and backend in [lane.gloo for lane in groups._lanes]:
            rank.reached("first lane", epoch=groups.epoch)

    groups.make_lanes, GlooBackend.edit = reporting_make, reporting_edit


def tensors_of(job):
    return [tensor for tensor, _ in job._nominal.units.stages[0].tensors]


def units(job):
    """Everything that a slot holds, unit by unit."""
    found = {}
    for tensor in tensors_of(job):
        held = job._plan.units_of(tensor, job.slot)
        for entry, values in job.state.entries(tensor.name).items():
            for start, stop in held:
                for unit in range(start, stop):
                    ranges = local_ranges(tensor, held, ((unit, unit + 1),))
                    parts = [values.detach().narrow(tensor.dim, a, b - a) for a, b in ranges]
                    found[tensor.name, entry, unit] = torch.cat(parts, tensor.dim).clone()
    assert sp.size(held) or not found
    return found
