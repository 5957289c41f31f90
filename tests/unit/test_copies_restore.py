"""All members at once, each a thread, restore a version from copies in another layout."""

import contextlib
import json
import pickle
import threading

import pytest
import torch

from ntp_plugin.copies.manifest import Version
from ntp_plugin.copies.replicator import Part, Replicator, Snapshot
from ntp_plugin.copies.restore import Restoration, describe, restorable
from ntp_plugin.copies.slices import TensorSlice, indices
from ntp_plugin.copies.store import FAR, NEAR, CopyKey, Store
from ntp_plugin.copies.wire import Peer, Server
from ntp_plugin.errors import StateLost
from tests.patience import until
from tests.unit.copies_bytes import mapped
from tests.unit.test_copies_wire import SECRET

VERSION = Version(step=5, epoch=2)
SHAPES = {"column": (12, 5), "row": (4, 9), "flat": (41,), "norm": (6,)}
DTYPES = {"main": torch.float32, "moment": torch.bfloat16}


def slice_of(tensor, dim, *ranges, start=0, stop=None, whole=""):
    shape = SHAPES[tensor]
    rows = sum(last - first for first, last in ranges)
    size = rows * torch.Size(shape).numel() // shape[dim]
    return TensorSlice(
        tensor=tensor,
        shape=shape,
        dim=dim,
        ranges=ranges,
        start=start,
        stop=size if stop is None else stop,
        whole=whole,
    )


HALVES = {
    0: [
        slice_of("column", 0, (0, 6)),
        slice_of("row", 1, (0, 5)),
        slice_of("flat", 0, (0, 41), stop=20),
        slice_of("norm", 0, (0, 6), whole="0"),
    ],
    1: [
        slice_of("column", 0, (6, 12)),
        slice_of("row", 1, (5, 9)),
        slice_of("flat", 0, (0, 41), start=20),
        slice_of("norm", 0, (0, 6), whole="1"),
    ],
}
THIRDS = {
    0: [
        slice_of("column", 0, (9, 12), (2, 4)),
        slice_of("row", 1, (8, 9)),
        slice_of("flat", 0, (30, 41), (0, 30), stop=12),
        slice_of("norm", 0, (0, 6), whole="0"),
    ],
    1: [
        slice_of("column", 0, (0, 1)),
        slice_of("row", 1, (4, 6), (1, 3), (6, 8)),
        slice_of("flat", 0, (30, 41), (0, 30), start=12, stop=13),
        slice_of("norm", 0, (3, 6), (0, 3), whole="1"),
    ],
    2: [
        slice_of("column", 0, (4, 9), (1, 2)),
        slice_of("row", 1, (0, 1), (3, 4)),
        slice_of("flat", 0, (30, 41), (0, 30), start=13),
        slice_of("norm", 0, (0, 6), start=0, stop=2, whole="2"),
        slice_of("norm", 0, (0, 6), start=2, stop=6, whole="2"),
    ],
}


def state(step):
    generator = torch.Generator().manual_seed(step)
    return {
        tensor: {name: torch.randn(shape, generator=generator).to(dtype) for name, dtype in DTYPES.items()}
        for tensor, shape in SHAPES.items()
    }


def part_of(whole, wanted):
    index = indices(wanted.runs.starts, wanted.runs.lengths)
    values = {name: values.reshape(-1)[index] for name, values in whole[wanted.tensor].items()}
    return Part(tensor_slice=wanted, values=values, numbers={"step": 5})


def room_for(wanted):
    """Room for a part, with values that reveal what is not filled."""
    values = {name: torch.full((wanted.size,), torch.nan, dtype=dtype) for name, dtype in DTYPES.items()}
    return Part(tensor_slice=wanted, values=values, numbers={})


class Process:
    """One slot's: its own view of its host's store, and its server."""

    def __init__(self, folder, slot, host):
        self.slot, self.host, self.trouble, self.peers = slot, host, [], {}
        self.store = Store(folder / f"host-{host}")
        self.server = Server(self.store, run="run", secret=SECRET, host="127.0.0.1", report=self.trouble.append)

    def peer(self, address):
        if address not in self.peers:
            self.peers[address] = Peer(address, run="run", secret=SECRET, timeout_s=20.0)
        return self.peers[address]

    def copy(self, version, slices, holders, far, members=()):
        replicator = Replicator(
            self.store, run="run", secret=SECRET, slot=self.slot, timeout_s=20.0, trouble=self.trouble.append
        )
        with contextlib.closing(replicator):
            replicator.send_to(far, members=members)
            whole = state(version.step)
            parts = [part_of(whole, each) for each in slices]
            extras = {"consumed": 8 * version.step, "of": self.slot}
            replicator.begin(Snapshot(version=version, holders=holders, parts=parts, extras=extras))
            until(lambda: replicator.through)
            assert replicator.ok

    def close(self):
        for peer in self.peers.values():
            peer.close()
        self.server.close()
        self.store.close()


class Meeting:
    """An all-gather of bytes among all members."""

    def __init__(self, members):
        self._words, self._barrier = [b""] * members, threading.Barrier(members, timeout=60)

    def of(self, number):
        def all_gather(what):
            self._words[number] = pickle.dumps(what)
            self._barrier.wait()
            gathered = [pickle.loads(word) for word in self._words]
            self._barrier.wait()
            return gathered

        return all_gather

    def leave(self):
        self._barrier.abort()


def together(members, act):
    """The result of each member, including a StateLost, which all must raise."""
    meeting, found = Meeting(len(members)), [None] * len(members)

    def take_part(number):
        try:
            found[number] = act(members[number], meeting.of(number))
        except StateLost as error:
            found[number] = error
        except BaseException as error:
            found[number] = error
            meeting.leave()

    threads = [threading.Thread(target=take_part, args=(number,)) for number in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in found:
        if isinstance(result, BaseException) and not isinstance(result, StateLost):
            raise result
    return found


@pytest.fixture
def started(tmp_path):
    """Starts the process of a slot on a host."""
    with contextlib.ExitStack() as running:
        yield lambda slot, host: running.enter_context(contextlib.closing(Process(tmp_path, slot, host)))


def write_halves(processes, version=VERSION, *, far=True):
    """Slot by slot near, and far on the other's host."""
    for process, other in zip(processes, reversed(processes), strict=True):
        process.copy(version, HALVES[process.slot], (0, 1), [other.server.address] if far else [])


@pytest.fixture
def written(tmp_path):
    """Two hosts have both halves, and their processes are over."""
    with contextlib.ExitStack() as running:
        processes = [running.enter_context(contextlib.closing(Process(tmp_path, slot, slot))) for slot in (0, 1)]
        write_halves(processes)


def nothing(_process, _parts):
    """Do nothing between filling and verifying."""


def restore(members, layout, *, version=VERSION, afterwards=nothing):
    """(what came from where, the parts) of each member, verified; or the StateLost that it raised."""

    def act(process, all_gather):
        alike = [member.slot for member in members if member.host == process.host]
        restoration = Restoration(
            version,
            process.store,
            slot=process.slot,
            host=process.host,
            is_host_leader=process.slot == min(alike),
            all_gather=all_gather,
            address=process.server.address,
            peer=process.peer,
            trouble=process.trouble.append,
        )
        parts = [room_for(each) for each in layout[process.slot]]
        done = restoration.fill(parts)
        afterwards(process, parts)
        restoration.verify(parts)
        return done, parts, restoration

    return together(members, act)


def assert_sound(results, step=5):
    whole = state(step)
    assert not [result for result in results if isinstance(result, StateLost)]
    for _, parts, _ in results:
        for part in parts:
            expected = part_of(whole, part.tensor_slice).values
            assert part.values.keys() == expected.keys()
            for name, live in part.values.items():
                assert torch.equal(live, expected[name]), f"{part.tensor_slice.tensor} {name}"


def total(done):
    return done.own + done.here + done.elsewhere


def bytes_of(slices):
    return sum(each.size * sum(dtype.itemsize for dtype in DTYPES.values()) for each in slices)


def corrupt(folder, host, place, tensor):
    """Flip a bit of the last entry of what a copy has of a tensor."""
    store = Store(folder / f"host-{host}")
    (held,) = (held for held in store.manifest(place).held if held.tensor_slice.tensor == tensor)
    mapped(store, place)[held.entries[-1].offset + 3] ^= 16
    store.close()


def copy_at(kind, slot):
    return CopyKey(kind=kind, slot=slot, epoch=2, number=0)


def test_copies_of_two_slots_are_assembled_for_three(written, started):
    """The third has nothing of its own, and takes what others on its host have."""
    members = [started(0, 0), started(1, 1), started(2, 1)]
    results = restore(members, THIRDS)
    assert_sound(results)
    for member, (done, _, restoration) in zip(members, results, strict=True):
        assert member.trouble == []
        assert (done.version, done.broken) == (VERSION, ())
        assert total(done) == bytes_of(THIRDS[member.slot])
        assert done.elsewhere == 0, "each host has all: half of it far"
        assert restoration.kinds().keys() == SHAPES.keys()
        assert restoration.kinds()["flat"].numbers == {"step": 5}
    (first, _, own), (second, _, _), (third, _, _) = results
    assert first.own > 0 < second.own
    assert first.here > 0 < second.here
    assert (third.own, third.here) == (0, total(third))
    assert own.extras() == {"consumed": 40, "of": 0}


def test_the_same_layout_needs_only_the_own_copy(written, started):
    members = [started(0, 0), started(1, 1)]
    results = restore(members, HALVES)
    assert_sound(results)
    for member, (done, _, restoration) in zip(members, results, strict=True):
        assert done.own == total(done) == bytes_of(HALVES[member.slot])
        assert restoration.extras()["of"] == member.slot


def test_missing_parts_come_from_other_hosts(started):
    """There are near copies only, and one of the members is on a host that has none."""
    before = [started(0, 0), started(1, 1)]
    write_halves(before, far=False)
    members = [*before, started(2, 2)]
    results = restore(members, THIRDS)
    assert_sound(results)
    (first, _, _), (second, _, _), (third, _, _) = results
    assert first.own > 0 < first.elsewhere
    assert second.own > 0 < second.elsewhere
    assert (third.own, third.here, third.elsewhere) == (0, 0, bytes_of(THIRDS[2]))


def test_far_copies_cover_a_lost_host(written, started):
    members = [started(0, 0), started(1, 2), started(2, 0)]
    results = restore(members, THIRDS)
    assert_sound(results)
    assert results[0][0].elsewhere == results[2][0].elsewhere == 0
    assert results[1][0].elsewhere == bytes_of(THIRDS[1])


@pytest.mark.parametrize("tensor", SHAPES)
def test_a_changed_near_copy_is_skipped(written, started, tmp_path, tensor):
    corrupt(tmp_path, 0, copy_at(NEAR, 0), tensor)
    members = [started(0, 0), started(1, 1), started(2, 0)]
    results = restore(members, THIRDS)
    assert_sound(results)
    assert all(done.broken == ("near-0-e2-0 on host 0",) for done, _, _ in results)
    elsewhere = results[0][0].elsewhere + results[2][0].elsewhere
    assert (elsewhere > 0) == (tensor != "norm"), "the other half here has that as well"
    assert any(
        "near-0-e2-0" in message and f"{tensor} (moment) in it is not" in message
        for message in members[0].trouble + members[2].trouble
    )
    assert members[1].trouble == []


def test_a_changed_copy_on_another_host_is_skipped(written, started, tmp_path):
    """The reader reports it, and so does its host."""
    corrupt(tmp_path, 0, copy_at(NEAR, 0), "column")
    members = [started(0, 0), started(1, 1), started(2, 2)]
    layout = {0: [], 1: [], 2: [slice_of("column", 0, (0, 12))]}
    results = restore(members, layout)
    assert_sound(results)
    assert all(done.broken == ("near-0-e2-0 on host 0",) for done, _, _ in results)
    assert any("is not used" in message for message in members[2].trouble)
    assert any("near-0-e2-0 holds column (moment)" in message for message in members[0].trouble)


def test_a_truncated_copy_is_not_used(written, started, tmp_path):
    with (tmp_path / "host-0" / "near-0-e2-0").open("r+b") as file:
        file.truncate(100)
    members = [started(0, 0), started(1, 1), started(2, 0)]
    results = restore(members, THIRDS)
    assert_sound(results)
    assert results[0][0].own == 0 < results[0][0].elsewhere


def test_all_members_raise_when_no_copy_of_a_part_is_sound(written, started, tmp_path):
    corrupt(tmp_path, 0, copy_at(NEAR, 0), "flat")
    corrupt(tmp_path, 1, copy_at(FAR, 0), "flat")
    members = [started(0, 0), started(1, 1), started(2, 0)]
    results = restore(members, THIRDS)
    for found in results:
        assert isinstance(found, StateLost)
        assert "no sound copy of step 5 as laid out in epoch 2 has" in found.what
        assert "elements of flat" in found.what
        assert "not as they were written: far-0-e2-0 on host 1, near-0-e2-0 on host 0" in found.what
    assert len({str(found) for found in results}) == 1


def test_an_older_version_is_restored_if_the_newest_cannot(started, tmp_path):
    before = [started(0, 0), started(1, 1)]
    write_halves(before, Version(step=4, epoch=1))
    write_halves(before)
    for host, kind in [(0, NEAR), (1, FAR)]:
        corrupt(tmp_path, host, copy_at(kind, 0), "row")
    members = [*before, started(2, 0)]
    versions = restorable([describe(member.store) for member in members])
    assert versions == [VERSION, Version(step=4, epoch=1)]
    assert all(isinstance(found, StateLost) for found in restore(members, THIRDS, version=versions[0]))
    assert_sound(restore(members, THIRDS, version=versions[1]), step=4)


def test_complete_versions_are_listed_newest_first(started):
    first, second = before = [started(0, 0), started(1, 1)]
    whole = [Version(step=4, epoch=1), Version(step=5, epoch=2), Version(step=5, epoch=3), Version(step=10, epoch=4)]
    for version in (whole[2], whole[0], whole[3], whole[1]):
        write_halves(before, version)
    lacking = Version(step=11, epoch=5)
    first.copy(lacking, HALVES[0], (0, 1), [second.server.address])
    newest_first = whole[::-1]
    descriptions = [describe(each.store) for each in before]
    assert restorable(descriptions) == restorable([*descriptions, "", "[]"]) == newest_first
    assert restorable(descriptions[:1]) == restorable(descriptions[1:]) == newest_first, "each host has both parts"
    second.copy(lacking, HALVES[1], (0, 1), [])
    assert restorable([describe(each.store) for each in before]) == [lacking, *newest_first]
    assert restorable([describe(first.store)]) == newest_first
    assert restorable([]) == restorable([""]) == []


def test_a_member_without_copies_of_a_version_is_not_waited_for():
    description = json.dumps([[5, 2, slot, [0, 3]] for slot in (0, 3)])
    assert restorable([description]) == [VERSION]
    assert restorable([json.dumps([[5, 2, 0, [0, 3]]])]) == []


@pytest.mark.parametrize("at", [(0, 0, "column"), (2, 2, "flat"), (1, 3, "norm"), (2, 4, "norm")])
@pytest.mark.parametrize("entry", ["main", "moment"])
def test_all_members_raise_when_one_restored_value_differs(written, started, at, entry):
    members = [started(0, 0), started(1, 1), started(2, 1)]
    slot, number, named = at

    def change(process, parts):
        if process.slot == slot:
            parts[number].values[entry][-1] *= -1

    for found in restore(members, THIRDS, afterwards=change):
        assert isinstance(found, StateLost)
        assert found.what.startswith(f"{named} ({entry}) of step 5 as laid out in epoch 2 is not what was copied")


def test_all_members_raise_when_two_restored_values_are_swapped(written, started):
    """Each bit is there, and not where it was."""
    members, swapped = [started(0, 0), started(1, 1), started(2, 1)], {}
    both = threading.Barrier(2, timeout=60)

    def swap(process, parts):
        if process.slot == 2:
            return
        swapped[process.slot] = parts[0].values["main"][0].clone()
        both.wait()
        parts[0].values["main"][0] = swapped[1 - process.slot]

    for found in restore(members, THIRDS, afterwards=swap):
        assert isinstance(found, StateLost)
        assert "column (main)" in found.what


def test_a_copy_that_one_process_does_not_send_is_requested_from_another(started):
    """Two processes of a host list one copy: the host leader, and the slot itself. The first does not answer."""
    before = [started(0, 0), started(1, 0)]
    write_halves(before, far=False)
    members = [*before, started(2, 1)]
    silent, asking = members[0].server.address, members[2]
    asking.peers[silent] = Peer(silent, run="run", secret="another", timeout_s=20.0)
    layout = {0: [slice_of("column", 0, (0, 6))], 1: [], 2: [slice_of("column", 0, (6, 12))]}
    assert_sound(restore(members, layout))
