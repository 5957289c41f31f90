"""Both routes on real ranks: every slot ends with the sums of its state, with the same bits in all replicas."""

import dataclasses
import functools

import numpy as np
import pytest

from benchmarks.routed import cut_tensors, small_nominal, whole
from ntp_plugin.testing.ranks import Ranks
from tests.ranks.routes_job import RATE, reduce_by_all_routes

BOUND = 1e-12
LOSSES = {
    (4, 2): ["r1.s0.t3", "r1.s0.t0,r1.s0.t3", "r0.s0.t1,r1.s0.t2", "r0.s0.t0,r0.s0.t2,r0.s0.t3,r1.s0.t1"],
    (3, 3): ["r2.s0.t1", "r0.s0.t0,r1.s0.t1,r2.s0.t2", "r0.s0.t0,r0.s0.t1,r1.s0.t1", "r0.s0.t2,r1.s0.t2,r2.s0.t2"],
    (2, 4): ["r0.s0.t0", "r0.s0.t0,r1.s0.t1", "r0.s0.t1,r1.s0.t1,r3.s0.t0"],
    (5, 1): ["r0.s0.t2"],
}
CASES = [(shape, number) for shape, losses in LOSSES.items() for number in range(len(losses))]
NAMES = [f"TP{tp} x {dp} without {LOSSES[tp, dp][number]}" for (tp, dp), number in CASES]


@functools.cache
def outcomes(shape, spoil=None):
    """Results of the living slots after each loss."""
    tp, dp = shape
    play = functools.partial(reduce_by_all_routes, tp=tp, dp=dp, losses=LOSSES[shape], spoil=spoil)
    with Ranks(tp * dp, play) as ranks:
        of_slots = ranks.wait()
    return [[routed for routed in slots if routed is not None] for slots in zip(*of_slots.values(), strict=True)]


def put_together(routed_slots, route, tensors):
    """Replica -> tensor -> the full tensor of its slots, every place filled once."""
    found = {}
    for routed in routed_slots:
        for tensor in tensors:
            values = found.setdefault(routed.replica, {}).setdefault(tensor.name, np.full(tensor.shape, np.nan))
            places = [slice(None)] * values.ndim
            places[tensor.dim] = routed.index[tensor.name]
            assert np.isnan(values[tuple(places)]).all()
            values[tuple(places)] = routed.values[route][tensor.name]
    return found


def worst_difference(routed_slots, route, shape):
    """To the sums over the replicas, or to the weights that they make."""
    tensors, worst = cut_tensors(small_nominal(*shape)), 0.0
    for replica in put_together(routed_slots, route, tensors).values():
        for tensor in tensors:
            expected = sum(whole(tensor, 1 + other).numpy() for other in range(shape[1]))
            if route == "sharded":
                expected = whole(tensor, 0).numpy() - RATE * expected
            worst = max(worst, np.abs(replica[tensor.name] - expected).max() / np.abs(expected).max())
            assert not np.isnan(worst), "every place is filled"
    return worst


@pytest.mark.parametrize(("shape", "number"), CASES, ids=NAMES)
def test_every_route_ends_in_the_same_sums(shape, number):
    routed_slots = outcomes(shape)[number]
    for route in ("direct", "via_core", "sharded"):
        assert worst_difference(routed_slots, route, shape) <= BOUND, route


@pytest.mark.parametrize(("shape", "number"), CASES, ids=NAMES)
def test_all_replicas_and_a_repeated_run_have_the_same_bits(shape, number):
    routed_slots = outcomes(shape)[number]
    for route in ("direct", "via_core", "sharded"):
        first, *others = put_together(routed_slots, route, cut_tensors(small_nominal(*shape))).values()
        for other in others:
            for name, values in first.items():
                assert values.tobytes() == other[name].tobytes(), (route, name)
    for routed in routed_slots:
        for name, values in routed.values["via_core"].items():
            assert values.tobytes() == routed.values["repeated"][name].tobytes()


def to_the_wrong_core(core_slices, slot):
    """The first slot of replica 0 that lends to two cores exchanges what is as long in both."""
    lent = [place for place, slices in enumerate(core_slices.out) if slices and place != core_slices.place]
    if slot.replica or len(lent) < 2:
        return core_slices
    one, other = lent[:2]
    out = [list(slices) for slices in core_slices.out]
    at = {part.name: number for number, part in enumerate(out[other])}
    for number, part in enumerate(out[one]):
        reference = at.get(part.name)
        if reference is not None and size(out[other][reference]) == size(part):
            out[one][number], out[other][reference] = out[other][reference], part
    return dataclasses.replace(core_slices, out=tuple(map(tuple, out)))


def size(part):
    return sum(stop - start for start, stop in part.ranges)


def test_units_sent_to_the_wrong_core_are_detected():
    spoilt = outcomes((4, 2), to_the_wrong_core)
    differences = [worst_difference(routed, "via_core", (4, 2)) for routed in spoilt]
    assert max(differences) > 1e-3, differences
    assert max(worst_difference(routed, "direct", (4, 2)) for routed in spoilt) <= BOUND
