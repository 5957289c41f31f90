"""Copies rebuilt from parities on real stores: any one member's, and nothing that is wrong."""

import contextlib
import dataclasses
import json
from contextlib import closing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ntp_plugin.copies import parity
from ntp_plugin.copies.layout import CopyBatch
from ntp_plugin.copies.manifest import Version, views
from ntp_plugin.copies.parity import ParityStore, WrongParity, fold, fold_batch, rebuild
from ntp_plugin.copies.restore import describe, restorable
from ntp_plugin.copies.store import FAR, NEAR, REBUILT, CopyKey, NoRoom, Store
from ntp_plugin.errors import StateLost
from tests.unit.copies_bytes import bytes_of, mapped, wrong_in
from tests.unit.test_copies_parity import MEMBERS, PLACE, batches_of, copies_of
from tests.unit.test_copies_restore import (
    HALVES,
    THIRDS,
    VERSION,
    Process,
    assert_sound,
    copy_at,
    corrupt,
    restore,
)
from tests.unit.test_copies_store import some_values, written


@given(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.randoms())
def test_machine_code_folds_as_torch_does(sizes, dice):
    """Some pieces of those that came."""
    if parity.machine() is None:
        pytest.skip("it was not built")
    memory, manifest = written({f"{size} of {at}": torch.zeros(size) for at, size in enumerate(sizes)})
    memory.copy_(torch.frombuffer(bytearray(dice.randbytes(len(memory))), dtype=torch.uint8))
    came, first, until = (dice.randrange(len(sizes) + 1) for _ in range(3))
    first, until = min(first, until), max(first, until)
    begin = manifest.held[min(came, first)].entries[0].offset if first < until else 0
    batch = CopyBatch(first=first, until=until, begin=begin, end=len(memory))
    parities = [torch.arange(len(memory) + 8, dtype=torch.int64).to(torch.uint8) for _ in range(2)]
    fold_batch(parities[0], manifest, batch, memory[begin:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "machine", lambda: None)
        fold_batch(parities[1], manifest, batch, memory[begin:])
    assert torch.equal(*parities)


def test_negative_offsets_are_not_folded():
    """A manifest may contain any offset, and machine code writes there."""
    _, manifest = written(some_values())
    held = manifest.held[0]
    entry = dataclasses.replace(held.entries[0], offset=-64)
    room = torch.zeros(256, dtype=torch.uint8)
    values = {entry.name: torch.full((16,), 0xFF, dtype=torch.uint8)}
    fold(room[128:], dataclasses.replace(held, entries=(entry,)), values)
    assert not room.any()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=2, max_size=5), st.data())
def test_any_member_comes_out_of_the_parity_and_the_others(tmp_path_factory, sizes, data):
    folder, members = tmp_path_factory.mktemp("parity"), tuple(range(len(sizes)))
    copies = copies_of(*range(10, 10 + len(sizes)), sizes=sizes)
    with closing(Store(folder)) as store:
        parities = ParityStore(store)
        for slot in data.draw(st.permutations(members)):
            parities.take(PLACE, members, copies[slot][1], batches_of(*copies[slot]))
        lost = data.draw(st.sampled_from(members))
        memory, manifest = copies[lost]

        def read(other, number, held):
            assert other.slot != lost
            return views(copies[other.slot][0], held)

        place = rebuild(store, PLACE, store.manifest(PLACE), manifest, read)
        assert place == CopyKey(kind=REBUILT, slot=lost, epoch=2, number=0)
        assert store.manifest(place) == manifest
        assert torch.equal(bytes_of(store, place)[: manifest.size], memory)
        mapped(store, PLACE)[manifest.held[0].entries[0].offset] ^= 1
        with pytest.raises(WrongParity, match=f"a \\(weight\\) of slot {lost} comes out of it wrong"):
            rebuild(store, PLACE, store.manifest(PLACE), manifest, read)
        assert store.manifest(place) is None, "nothing is left of it"


def test_a_full_host_is_reported_before_a_loss_and_has_room_after_it(tmp_path):
    copies = copies_of(1, 2, sizes=(1000, 1000))
    size, other = copies[0][1].size, dataclasses.replace(PLACE, number=1)
    with closing(Store(tmp_path / "full", at_most=3 * size - 1)) as store:
        store.open(PLACE, size)
        with pytest.raises(NoRoom, match="max_host_gb"):
            store.open(other, size)
    with closing(Store(tmp_path / "enough", at_most=3 * size)) as store:
        parities = ParityStore(store)
        for place in (PLACE, other):
            for memory, manifest in copies:
                parities.take(place, MEMBERS, manifest, batches_of(memory, manifest))
        with pytest.raises(NoRoom):
            store.open(copy_at(FAR, 7), 64)
        rebuild(store, PLACE, store.manifest(PLACE), copies[0][1], lambda _, __, held: views(copies[1][0], held))
        assert store.used == 3 * size


@pytest.fixture
def started(tmp_path):
    with contextlib.ExitStack() as running:
        yield lambda slot, host=None: running.enter_context(
            closing(Process(tmp_path, slot, slot if host is None else host))
        )


def write_thirds(processes, version=VERSION):
    """The first two share a parity on the third's host, and the third has a copy on the first's."""
    first, _, third = processes
    for process in processes:
        to, members = (first, ()) if process is third else (third, MEMBERS)
        process.copy(version, THIRDS[process.slot], (0, 1, 2), [to.server.address], members)


OLDER = Version(step=4, epoch=1)


@pytest.fixture
def written_thirds(started):
    processes = [started(slot) for slot in range(3)]
    for version in (OLDER, VERSION):
        write_thirds(processes, version)
    return processes


def without(processes, *lost):
    """The layout of the survivors."""
    left = [process for process in processes if process.slot not in lost]
    return left, {process.slot: HALVES[number] for number, process in enumerate(left)}


def versions(processes):
    return restorable([describe(process.store) for process in processes])


@pytest.mark.parametrize("lost", MEMBERS)
def test_a_member_that_is_lost_with_its_host_comes_from_the_parity(written_thirds, lost):
    left, layout = without(written_thirds, lost)
    assert versions(left) == [VERSION, OLDER]
    results = restore(left, layout)
    assert_sound(results)
    for process, (done, _, restoration) in zip(left, results, strict=True):
        assert process.trouble == []
        assert (done.broken, done.rebuilt) == ((), (f"rebuilt-{lost}-e2-0 on host 2",))
        assert restoration.kinds().keys() == {"column", "row", "flat", "norm"}
    assert wrong_in(left[1].store, copy_at(REBUILT, lost)) == []
    assert_sound(restore(left, layout, version=OLDER), step=4)
    again = restore(left, layout)
    assert_sound(again)


def test_nothing_is_rebuilt_when_all_copies_are_available(written_thirds):
    results = restore(written_thirds, {0: THIRDS[1], 1: THIRDS[2], 2: THIRDS[0]})
    assert_sound(results)
    assert all(done.rebuilt == () for done, _, _ in results)
    assert not any(place.kind == REBUILT for process in written_thirds for place, _ in process.store.found())


def test_the_host_of_a_parity_takes_no_member_with_it(written_thirds):
    left, layout = without(written_thirds, 2)
    assert versions(left) == [VERSION, OLDER]
    results = restore(left, layout)
    assert_sound(results)
    assert all(done.rebuilt == () for done, _, _ in results)


def test_two_losses_in_one_group_leave_no_version(written_thirds):
    left, _ = without(written_thirds, 0, 1)
    assert versions(left) == []
    ((_, _, found),) = restore(left, {2: []})
    with pytest.raises(StateLost, match=r"the copies of step 5 .* of 0, 1 are lost"):
        found.kinds()


def test_a_version_with_an_incomplete_parity_is_unavailable_and_the_one_before_is_used(written_thirds):
    """The other member's part did not arrive before the host was lost."""
    newest = Version(step=6, epoch=3)
    first, second, third = written_thirds
    first.copy(newest, THIRDS[0], (0, 1, 2), [third.server.address], MEMBERS)
    second.copy(newest, THIRDS[1], (0, 1, 2), [])
    third.copy(newest, THIRDS[2], (0, 1, 2), [first.server.address])
    assert versions(written_thirds)[0] == newest
    left, layout = without(written_thirds, 1)
    assert versions(left) == [VERSION, OLDER]
    assert_sound(restore(left, layout))


@pytest.mark.parametrize(
    ("there", "group", "stands"),
    [
        ([1, 2], [0, 1], True),
        ([2], [0, 1], False),
        ([0, 1, 2], None, True),
        ([1, 2], [0, 1, 3], False),
        ([1], [0], False),
    ],
)
def test_a_version_is_available_if_each_slot_has_a_copy_or_a_complete_parity(there, group, stands):
    description = json.dumps(
        [[5, 2, slot, [0, 1, 2]] for slot in there] + ([[5, 2, group, [0, 1, 2]]] if group else [])
    )
    assert (restorable([description]) == [VERSION]) == stands


# ---------------------------------------------------------------- what is wrong


def stale(path, host):
    """The bytes of the version before under the newer one's manifest."""
    folder = path / f"host-{host}"
    (folder / "parity-0-e2-0").write_bytes((folder / "parity-0-e1-0").read_bytes())


def truncated(path, host):
    with (path / f"host-{host}" / "parity-0-e2-0").open("r+b") as file:
        file.truncate(100)


def flipped(path, host):
    store = Store(path / f"host-{host}")
    mapped(store, PLACE)[5] ^= 32
    store.close()


@pytest.mark.parametrize("damage", [flipped, stale, truncated])
def test_a_wrong_parity_is_named_and_the_version_before_is_restored(written_thirds, tmp_path, damage):
    damage(tmp_path, 2)
    left, layout = without(written_thirds, 0)
    results = restore(left, layout)
    for found in results:
        assert isinstance(found, StateLost)
        assert "not as they were written: parity-0-e2-0 on host 2" in found.what
    assert any("parity-0-e2-0" in message for message in left[1].trouble)
    assert not any(place.kind == REBUILT for process in left for place, _ in process.store.found())
    assert_sound(restore(left, layout, version=OLDER), step=4)


def test_a_survivors_wrong_copy_is_named_and_the_version_before_is_restored(written_thirds, tmp_path):
    corrupt(tmp_path, 1, copy_at(NEAR, 1), "row")
    left, layout = without(written_thirds, 0)
    for found in restore(left, layout):
        assert isinstance(found, StateLost)
        assert "not as they were written: near-1-e2-0 on host 1" in found.what
    assert_sound(restore(left, layout, version=OLDER), step=4)


def test_a_wrong_near_copy_is_rebuilt(written_thirds, tmp_path):
    """No slot is lost, and the next far copy is a parity."""
    corrupt(tmp_path, 1, copy_at(NEAR, 1), "row")
    results = restore(written_thirds, THIRDS)
    assert_sound(results)
    for done, _, _ in results:
        assert done.broken == ("near-1-e2-0 on host 1",)
        assert done.rebuilt == ("rebuilt-1-e2-0 on host 2",)


def test_a_host_without_room_for_a_rebuilt_copy_reports_it(written_thirds, tmp_path, monkeypatch):
    left, layout = without(written_thirds, 0)

    def full(self, place, size, sound=Store.open):
        if place.kind == REBUILT:
            raise NoRoom(f"{place} would take {size}")
        return sound(self, place, size)

    monkeypatch.setattr(Store, "open", full)
    (_, _, found), _ = restore(left, {slot: [] for slot in layout})
    with pytest.raises(StateLost, match=r"the copies of step 5 .* of 0 are lost"):
        found.kinds()
    assert any("rebuilt-0-e2-0 would take" in message for message in left[1].trouble)


def test_skipping_the_verification_of_a_rebuilt_copy_is_detected(written_thirds, tmp_path, monkeypatch):
    """A negative control: a wrong parity is believed; the comparison in the end finds it."""
    flipped(tmp_path, 2)
    monkeypatch.setattr("ntp_plugin.copies.restore.wrong", lambda *_: [])
    monkeypatch.setattr("ntp_plugin.copies.wire.wrong", lambda *_: [])
    monkeypatch.setattr("ntp_plugin.copies.parity.wrong_in", lambda *_, **__: [])
    left, layout = without(written_thirds, 0)
    for found in restore(left, layout):
        assert isinstance(found, StateLost)
        assert "is not what was copied" in found.what
