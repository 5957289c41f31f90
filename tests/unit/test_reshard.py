"""Parts of tensors on one process: index arithmetic, packing, digests, and the state of an optimizer."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ntp_plugin.copies.digest import digest
from ntp_plugin.copies.runs import MODULUS, runs_of
from ntp_plugin.errors import Refused, StateLost
from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.shard_layout import lay_out
from ntp_plugin.planning.units import Family, Run, Tensor
from ntp_plugin.reduction.gradient_lanes import Slice, pack, unpack
from ntp_plugin.resharding.cuts import Recut, global_ranges, local_ranges, local_shape
from ntp_plugin.resharding.rebuild import WEIGHT, Rebuilding, are_alike, compare, summed, survey
from ntp_plugin.resharding.reshard_plan import NOT_HELD
from ntp_plugin.resharding.sharded_state import ShardedState
from tests.harness.parity.group_adam import FusedAdam


@st.composite
def cut_tensors(draw):
    """A tensor of one to three dims with one or two runs, and a layout of its units in which slots were lost."""
    units, tp, dims = draw(st.integers(4, 12)), draw(st.integers(2, 4)), draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    dim, start, runs = draw(st.integers(0, dims - 1)), 0, []
    for size in sizes:
        runs.append(Run(start=start, unit_size=size))
        start += size * units
    shape = [draw(st.integers(1, 3)) for _ in range(dims)]
    shape[dim] = start
    tensor = Tensor(name="t", shape=tuple(shape), family="f", dim=dim, runs=tuple(runs))
    lost = draw(st.frozensets(st.integers(0, tp - 1), max_size=tp - 1))
    layout = lay_out(Family(name="f", units=units), tp, tuple(sorted(lost)))
    return tensor, layout


def whole(tensor):
    return torch.arange(1, tensor.elements + 1, dtype=torch.float64).reshape(tensor.shape)


def part(tensor, values, units):
    """The part with these units, straight from their definition."""
    index = [
        run.start + unit * run.unit_size + row
        for run in tensor.runs
        for start, stop in units
        for unit in range(start, stop)
        for row in range(run.unit_size)
    ]
    return values.index_select(tensor.dim, torch.tensor(index, dtype=torch.int64))


@given(cut_tensors(), st.data())
def test_units_are_at_their_place_in_a_part(case, data):
    tensor, layout = case
    values = whole(tensor)
    for held in layout.holdings:
        assert tuple(part(tensor, values, held).shape) == local_shape(tensor, held)
        assert sp.size(global_ranges(tensor, held)) == local_shape(tensor, held)[tensor.dim]
        each = sorted(unit for start, stop in held for unit in range(start, stop))
        wanted = sp.joined((unit, unit + 1) for unit in each if data.draw(st.booleans()))
        found = [part(tensor, values, held).narrow(tensor.dim, a, b - a) for a, b in local_ranges(tensor, held, wanted)]
        if wanted:
            assert torch.equal(torch.cat(found, tensor.dim), part(tensor, values, wanted))


@given(cut_tensors())
def test_a_part_is_built_from_kept_state(case):
    tensor, layout = case
    nominal = lay_out(layout.family, len(layout.holdings))
    values = whole(tensor)
    for slot, after in enumerate(layout.holdings):
        kept = sp.intersection(sp.union(nominal.holdings[slot]), sp.union(after))
        entries = {WEIGHT: part(tensor, values, nominal.holdings[slot])}
        recut = Recut(tensor=tensor, before=nominal.holdings[slot], after=kept)
        built = Rebuilding.begin(recut, entries, {WEIGHT: torch.float64}).end()
        assert torch.equal(built[WEIGHT], part(tensor, values, kept))


@given(cut_tensors())
def test_packing_and_unpacking_is_the_identity_and_touches_nothing_else(case):
    tensor, layout = case
    nominal, values = lay_out(layout.family, len(layout.holdings)), whole(tensor)
    for held in filter(None, layout.holdings):
        gradients, seen = {"t": part(tensor, values, held)}, 0
        for lane in nominal.holdings:
            units = sp.intersection(sp.union(held), lane)
            slices = [Slice(name="t", dim=tensor.dim, ranges=local_ranges(tensor, held, units))] if units else []
            if not slices:
                continue
            buffer = pack(slices, gradients)
            assert sorted(buffer.tolist()) == sorted(part(tensor, values, units).reshape(-1).tolist())
            unpack(slices, gradients, -buffer)
            seen += buffer.numel()
        assert seen == gradients["t"].numel(), "every element is in one lane"
        assert torch.equal(gradients["t"], -part(tensor, values, held))


@given(cut_tensors(), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_a_digest_is_the_same_number_for_every_cut(case, dtype):
    tensor, layout = case
    values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    total = sum(digest_of(tensor, part(tensor, values, held), held) for held in layout.holdings) % MODULUS
    assert total == digest_of(tensor, values, ((0, layout.family.units),))


def digest_of(tensor, values, held, salt="t"):
    return digest(values, runs_of(tensor.shape, tensor.dim, global_ranges(tensor, held)), salt=salt)


def test_a_digest_detects_every_fault():
    tensor = Tensor(name="t", shape=(6, 3), family="f", runs=(Run(start=0, unit_size=1),))
    values, held = torch.randn(6, 3), ((0, 6),)
    sound = digest_of(tensor, values, held)
    flipped = values.clone()
    flipped.view(torch.int32)[2, 1] ^= 1
    swapped = values[[1, 0, 2, 3, 4, 5]]
    others = [(flipped, held, "t"), (swapped, held, "t"), (values, ((1, 6), (0, 1)), "t"), (values, held, "u")]
    numbers = [digest_of(tensor, *other) for other in others]
    assert len({sound, *numbers}) == 1 + len(others)


def test_a_tensor_that_differs_is_named_with_the_slots():
    tensor = Tensor(name="column.weight", shape=(4, 2), family="f", runs=(Run(start=0, unit_size=1),))
    values, surveys = torch.randn(4, 2), {}
    for slot, units in enumerate([((0, 2),), ((2, 4),), ((0, 4),)]):
        recut = Recut(tensor=tensor, before=units, after=units)
        entries = {WEIGHT: part(tensor, values, units)}
        if slot == 1:
            entries[WEIGHT] = entries[WEIGHT].flip(0)
        surveys[slot] = survey(recut, entries, entries, step=3)
    compare(tensor, surveys, holders_before=[[2]], holders_after=[[2]])
    with pytest.raises(
        StateLost, match=r"column\.weight \(weight\) is not the same.*after in slots 0, 1 \w{16}; after"
    ):
        compare(tensor, surveys, holders_before=[], holders_after=[[0, 1], [2]])


@given(st.data())
def test_sums_are_equal_when_every_tensor_is(data):
    """Versions of three tensors with two entries each, in replica digests of some slots."""
    numbers, replica_digests = st.integers(0, MODULUS - 1), [[0, 1], [2], [3, 4, 5]]
    before, after = data.draw(
        st.sampled_from(
            [(replica_digests[1:], replica_digests), ([], replica_digests), (replica_digests, replica_digests[:1])]
        )
    )
    surveys = {name: {slot: {} for slot in range(6)} for name in ("t1", "t2", "t3")}
    for of_slots in surveys.values():
        for entry, total in (("weight", data.draw(numbers)), ("moment", data.draw(numbers))):
            for whole in replica_digests:
                parts = [(data.draw(numbers), data.draw(numbers)) for _ in whole[1:]]
                rest = tuple((total - sum(part[fault_point] for part in parts)) % MODULUS for fault_point in (0, 1))
                for slot, numbers_of in zip(whole, [rest, *parts], strict=True):
                    of_slots[slot][entry] = numbers_of

    def alike():
        sums = {slot: summed(of_slots[slot] for of_slots in surveys.values()) for slot in range(6)}
        return are_alike(sums, holders_before=before, holders_after=after)

    def each_is_alike():
        for name, of_slots in surveys.items():
            tensor = Tensor(name=name, shape=(4, 2), family="f", runs=(Run(start=0, unit_size=1),))
            try:
                compare(tensor, of_slots, holders_before=before, holders_after=after)
            except StateLost:
                return False
        return True

    def right():
        """The digest by its definition."""
        totals = [
            {sum(of_slots[slot][entry][fault_point] for slot in whole) % MODULUS}
            for of_slots in surveys.values()
            for entry in ("weight", "moment")
            for fault_point, replica_digests_of in enumerate((before, after))
            for whole in replica_digests_of
        ]
        of_each = len(before) + len(after)
        return all(len(set().union(*totals[at : at + of_each])) == 1 for at in range(0, len(totals), of_each))

    assert alike() and each_is_alike() and right()
    survey_of = surveys[data.draw(st.sampled_from(sorted(surveys)))][data.draw(st.integers(0, 5))]
    entry, wrong, fault_point = (
        data.draw(st.sampled_from(sorted(survey_of))),
        data.draw(numbers),
        data.draw(st.booleans()),
    )
    survey_of[entry] = tuple(wrong if at == fault_point else right for at, right in enumerate(survey_of[entry]))
    assert alike() == each_is_alike() == right()


def test_the_users_objects_stay_and_only_state_of_that_shape_is_cut():
    parameter = torch.nn.Parameter(torch.ones(4, 2))
    optimizer = torch.optim.Adam([parameter])
    parameter.square().sum().backward()
    optimizer.step()
    state = ShardedState({"w": parameter}, optimizer)
    assert state.entries("w").keys() == {WEIGHT, "exp_avg", "exp_avg_sq"}
    assert state.kept("w").numbers.keys() == {"step"}
    state.build("w", 1, {name: torch.zeros(3, 2) for name in state.entries("w")}, state.kept("w").numbers)
    assert parameter.shape == (4, 2), "nothing is switched before it is compared"
    graph = parameter.square().sum()  # of the interrupted step, and still alive
    state.switch()
    assert parameter.shape == optimizer.state[parameter]["exp_avg"].shape == (3, 2)
    assert optimizer.param_groups[0]["params"] == [parameter]
    parameter.square().sum().backward()
    optimizer.step()
    del graph


def test_state_that_cannot_be_cut_is_refused():
    parameter = torch.nn.Parameter(torch.ones(4, 2))
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter]["rows"] = torch.ones(4)
    with pytest.raises(Refused, match=r"keeps rows of shape \(4,\) for w of shape \(4, 2\)"):
        ShardedState({"w": parameter}, optimizer).refuse_what_cannot_be_cut()


def test_built_tensors_are_dropped_unless_a_member_switched():
    parameter = torch.nn.Parameter(torch.ones(4))
    state = ShardedState({"w": parameter}, torch.optim.SGD([parameter]))
    state.build("w", 2, {WEIGHT: torch.zeros(3)}, {})
    state.settle({"w": 0})
    assert parameter.shape == (4,)
    state.build("w", 3, {WEIGHT: torch.zeros(3)}, {"step": 7})
    assert state.held({}).built == ((0, 3),)
    state.settle({"w": 3})
    assert parameter.shape == (3,)
    assert state.held({}).versions == (3,)
    assert NOT_HELD not in state.held({}).versions


def test_a_switch_takes_the_numbers_of_the_others():
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([parameter])
    state = ShardedState({"w": parameter}, optimizer, joiner=True)
    entries = {WEIGHT: torch.zeros(3), "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    other = torch.nn.Parameter(torch.ones(4))
    theirs = torch.optim.Adam([other])
    other.sum().backward()
    theirs.step()
    state.build("w", 3, entries, ShardedState({"w": other}, theirs).kept("w").numbers)
    state.settle({"w": 3})  # also in the recovery after one that was interrupted
    assert optimizer.state[parameter]["step"] == theirs.state[other]["step"] == 1
    assert torch.equal(optimizer.state[parameter]["exp_avg"], torch.ones(3))


def test_a_switch_takes_the_group_numbers_of_the_others():
    parameter, other = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
    optimizer, theirs = FusedAdam([parameter]), FusedAdam([other])
    for _ in range(2):
        other.grad = torch.ones(4)
        theirs.step()
    state = ShardedState({"w": parameter}, optimizer)
    entries = {WEIGHT: torch.zeros(3), "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    state.build("w", 3, entries, ShardedState({"w": other}, theirs).kept("w").numbers)
    state.switch()
    assert optimizer.param_groups[0]["step"] == 2
    assert optimizer.state[parameter].keys() == {"exp_avg", "exp_avg_sq"}


def lent(version):
    """A parameter of two elements that has got another one's four, while its optimizer keeps what it did."""
    parameter = torch.nn.Parameter(torch.ones(2))
    state = ShardedState({"w": parameter}, torch.optim.Adam([parameter]), joiner=False)
    state.lend("w", torch.full((4,), 7.0))
    assert parameter.shape == (4,) and state.held({}).versions == (0,) and not state.held({}).built
    state.settle({"w": version})
    return parameter, state


def test_lent_memory_is_returned_when_no_member_switched():
    parameter, state = lent(0)
    assert torch.equal(parameter, torch.ones(2))
    assert state.held({}).versions == (0,)


def test_lent_memory_stays_with_the_built_tensors():
    parameter, state = lent(0)
    weights = torch.full((4,), 7.0)
    state.lend("w", weights)
    state.build("w", 3, {WEIGHT: weights}, {})
    state.settle({"w": 3})  # another has switched
    assert torch.equal(parameter, weights)
    assert state.held({}).versions == (3,)
    state.settle({"w": 3})
    assert torch.equal(parameter, weights)
