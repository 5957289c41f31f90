"""The state of an optimizer, exported and imported elsewhere: it continues as if it had never been moved."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ntp_plugin.copies.layout import dtype_name
from ntp_plugin.copies.manifest import CopiedSlice, Entry
from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.errors import Refused
from ntp_plugin.reduction.stepped import Stepped, make_room, parts
from tests.harness.parity.group_adam import FusedAdam

SIZE = 12
MAKE = {
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.1, weight_decay=0.1),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.1, amsgrad=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "SGD, momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "FusedAdam": lambda groups: FusedAdam(groups, lr=0.1, weight_decay=0.1),
}


class Member:
    """A member with some elements of a tensor: those up to a place in one group, and the others in the other."""

    def __init__(self, name, cut, values):
        parts_of = [values[:cut], values[cut:]]
        self.parameters = [[torch.nn.Parameter(part.clone())] if len(part) else [] for part in parts_of]
        self.optimizer = MAKE[name]([{"params": group} for group in self.parameters])
        at = (0, cut)
        self.stepped = [
            Stepped(parameter=one, tensor_slices=((slice_of(start, start + len(one)), 0),))
            for start, group in zip(at, self.parameters, strict=True)
            for one in group
        ]

    def step(self, gradient):
        for one in self.stepped:
            ((held, _),) = one.tensor_slices
            one.parameter.grad = gradient[held.start : held.stop].clone()
        self.optimizer.step()

    @property
    def values(self):
        return torch.cat([one.parameter.detach() for one in self.stepped])


def slice_of(start, stop):
    return TensorSlice(tensor="w", shape=(SIZE,), dim=0, ranges=((0, SIZE),), start=start, stop=stop)


def copied(member):
    """The slice as in a manifest, and its values element by element."""
    found, values = parts(member.stepped, member.optimizer), {}
    for part in found:
        for name, value in part.values.items():
            values.setdefault(name, torch.zeros(SIZE, dtype=value.dtype))[
                part.tensor_slice.start : part.tensor_slice.stop
            ] = value
    first = found[0]
    entries = (Entry(name=name, dtype=dtype_name(values[name].dtype), offset=0, digest=0) for name in values)
    return CopiedSlice(
        tensor_slice=first.tensor_slice, entries=tuple(entries), numbers=json.loads(json.dumps(dict(first.numbers)))
    ), values


def moved(name, member, cut):
    """Move the state to a member with another cut and other values."""
    held, values = copied(member)
    other = Member(name, cut, torch.full((SIZE,), 7.0))
    other.step(torch.ones(SIZE))
    with torch.no_grad():
        for part in make_room(other.stepped, other.optimizer, {"w": held}):
            assert part.values.keys() == values.keys()
            for entry, value in part.values.items():
                value.copy_(values[entry][part.tensor_slice.start : part.tensor_slice.stop])
    return other


@pytest.mark.parametrize("name", MAKE)
@given(
    steps=st.integers(0, 3),
    cuts=st.tuples(st.integers(0, SIZE), st.integers(0, SIZE), st.integers(0, SIZE)),
    seed=st.integers(0, 9),
)
def test_a_moved_member_steps_as_the_reference(name, steps, cuts, seed):
    """A group may have no parameter before, and get one in the second move."""
    values, *gradients = torch.randn(steps + 3, SIZE, generator=torch.Generator().manual_seed(seed))
    member, reference = (Member(name, cut, values) for cut in (cuts[0], SIZE // 2))
    for gradient in gradients[:steps]:
        member.step(gradient)
        reference.step(gradient)
    for cut, gradient in zip(cuts[1:], gradients[steps:], strict=True):
        member = moved(name, member, cut)
        member.step(gradient)
        reference.step(gradient)
        assert torch.equal(member.values, reference.values)


def test_copies_without_the_numbers_of_a_group_are_refused():
    member = Member("FusedAdam", 6, torch.ones(SIZE))
    member.step(torch.ones(SIZE))
    held, _ = copied(member)
    without_numbers = CopiedSlice(tensor_slice=held.tensor_slice, entries=held.entries, numbers={})
    with pytest.raises(Refused, match="the copies of w lack its optimizer's step"):
        make_room(member.stepped, member.optimizer, {"w": without_numbers})
