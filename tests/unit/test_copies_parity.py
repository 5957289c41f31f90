"""Parities on real stores and sockets: any one member's copy can be rebuilt, and nothing wrong is used."""

import contextlib
import dataclasses
from contextlib import closing

import pytest
import torch

from ntp_plugin.copies import layout, table, wire
from ntp_plugin.copies.layout import CopyBatch
from ntp_plugin.copies.manifest import Version
from ntp_plugin.copies.parity import ParityStore, Unwanted, members_of, parity_place
from ntp_plugin.copies.store import NEAR, PARITY, CopyKey, Store
from ntp_plugin.copies.wire import PeerTrouble
from tests.patience import until
from tests.unit.copies_bytes import bytes_of, mapped, wrong_in
from tests.unit.test_copies_replicator import Here, snapshot, some_parts
from tests.unit.test_copies_store import some_values, written
from tests.unit.test_copies_wire import There, no_pace

MEMBERS = (0, 1)
PLACE = CopyKey(kind=PARITY, slot=0, epoch=2, number=0)


def xor(*parts):
    """XOR of bytes of several lengths, padded with zeros."""
    whole = torch.zeros(max(map(len, parts)), dtype=torch.uint8)
    for part in parts:
        whole[: len(part)] ^= part
    return whole


def copies_of(*seeds, step=5, sizes=(1000, 700, 400)):
    """A copy for each member, none as long as another."""
    return [
        written(some_values(seed, size), step=step, slot=slot)
        for slot, (seed, size) in enumerate(zip(seeds, sizes, strict=False))
    ]


@pytest.fixture
def taken_at_once(monkeypatch):
    """So many bytes of the next copies."""

    def at_most(size):
        monkeypatch.setattr(layout, "AT_ONCE", size)
        for remembered in (layout.laid_out, layout.read_layout):
            remembered.cache_clear()

    yield at_most
    at_most(table.AT_ONCE)


def batches_of(memory, manifest):
    """Batches as they arrive, slice by slice."""
    return [
        (CopyBatch(first=number, until=number + 1, begin=begin, end=end), memory[begin:end])
        for number, held in enumerate(manifest.held)
        for begin in [held.entries[0].offset]
        for end in [held.entries[-1].offset + held.bytes_of(held.entries[-1])]
    ]


def is_parity_of(store, place, *copies):
    return torch.equal(bytes_of(store, place)[: store.manifest(place).size], xor(*(memory for memory, _ in copies)))


@pytest.fixture
def there(tmp_path):
    with closing(There(tmp_path / "there")) as there:
        yield there


# ---------------------------------------------------------------- keeping


def test_a_parity_is_available_only_when_all_members_are_folded(there):
    first, second = copies_of(1, 2)
    for peer, (memory, manifest) in zip((there.peer(), there.peer()), (second, first), strict=True):
        assert list(there.store.found()) == []
        assert peer.put(PLACE, manifest, memory, pace=no_pace, members=MEMBERS) == []
    ((place, parity),) = there.store.found()
    assert (place, parity.version, parity.holders) == (PLACE, Version(step=5, epoch=2), (0, 9))
    assert members_of(parity) == (first[1], second[1])
    assert is_parity_of(there.store, PLACE, first, second), "and the later one was longer"
    assert wrong_in(there.store, PLACE) == []
    assert there.reported == []
    mapped(there.store, PLACE)[77] ^= 4
    assert wrong_in(there.store, PLACE) == ["parity (xor)"]


def break_off(after):
    """A pace at which the connection breaks, `after` so many chunks."""
    left = iter(range(after))

    def pace(_):
        if next(left, None) is None:
            raise ConnectionResetError("as if a cable were pulled")

    return pace


def send_in_parts(there, copies, breaks):
    """All members' copies, of the first again and again where it breaks off."""
    for number, (memory, manifest) in enumerate(copies):
        for after in breaks if number == 0 else ():
            with pytest.raises(PeerTrouble, match="as if a cable were pulled"):
                there.peer().put(PLACE, manifest, memory, pace=break_off(after), members=MEMBERS)
            until(lambda: not there.server._open)
        assert there.peer().put(PLACE, manifest, memory, pace=no_pace, members=MEMBERS) == []


@pytest.mark.parametrize("at_once", [100, 1 << 20])
def test_an_empty_slice_is_folded_like_any_other(there, taken_at_once, at_once):
    taken_at_once(at_once)
    copies = []
    for memory, manifest in copies_of(1, 2):
        (first, *others), numbers = manifest.layout.tensor_slices, manifest.numbers
        nothing = first[0], ()
        more = layout.laid_out((nothing, first, nothing, *others, nothing))
        numbers = ({}, numbers[0], {}, *numbers[1:], {})
        copies.append((memory, dataclasses.replace(manifest, layout=more, numbers=numbers)))
    send_in_parts(there, copies, ())
    assert is_parity_of(there.store, PLACE, *copies)


@pytest.mark.parametrize("batch", [500, 1 << 20], ids=["one by one", "at once"])
@pytest.mark.parametrize("breaks", [(0,), (3,), (23,), (23, 1, 20), (24, 24)])
def test_a_slice_sent_again_after_a_broken_connection_is_folded_once(there, monkeypatch, taken_at_once, breaks, batch):
    monkeypatch.setattr(wire, "CHUNK", 500)
    taken_at_once(batch)
    copies = copies_of(1, 2)
    first, second, _ = copies[0][1].held
    assert first.bytes_of(first.entries[0]) == 500 * 24, "it breaks off in the first piece, behind it, and in the end"
    assert second.entries[0].offset < copies[0][1].size <= 500 * 25
    send_in_parts(there, copies, breaks)
    until(lambda: len(list(there.store.found())) == 1)
    assert is_parity_of(there.store, PLACE, *copies)


def test_folding_a_slice_twice_is_detected(there, monkeypatch, taken_at_once):
    """A negative control: pieces that are in are folded again, which takes them out."""
    sound = ParityStore._fold_once

    def forgetful(self, place, staged, manifest, *batch):
        staged.folded[manifest.slot] = batch[0].first
        sound(self, place, staged, manifest, *batch)

    monkeypatch.setattr(ParityStore, "_fold_once", forgetful)
    monkeypatch.setattr(wire, "CHUNK", 500)
    taken_at_once(500)
    copies = copies_of(1, 2)
    send_in_parts(there, copies, [23])
    assert not is_parity_of(there.store, PLACE, *copies)


def test_a_slice_that_arrives_twice_changes_nothing(there):
    """The answer was lost."""
    copies = copies_of(1, 2)
    for memory, manifest in [*copies, *copies]:
        assert there.peer().put(PLACE, manifest, memory, pace=no_pace, members=MEMBERS) == []
    assert is_parity_of(there.store, PLACE, *copies)


def test_a_slice_with_a_wrong_digest_is_not_folded(there):
    copies = copies_of(1, 2)
    memory, manifest = copies[0]
    flipped = memory.clone()
    flipped[manifest.held[1].entries[0].offset] ^= 8
    peer = there.peer()
    assert peer.put(PLACE, manifest, flipped, pace=no_pace, members=MEMBERS) == ["b (weight)"]
    assert there.reported == ["slot 0 sent b (weight) of step 5 as laid out in epoch 2, which arrived wrong"]
    assert peer.put(PLACE, copies[1][1], copies[1][0], pace=no_pace, members=MEMBERS) == []
    assert list(there.store.found()) == [], "the first member is not in"
    assert peer.put(PLACE, manifest, memory, pace=no_pace, members=MEMBERS) == [], "over the same connection"
    assert is_parity_of(there.store, PLACE, *copies)


def test_an_older_version_of_one_member_is_refused_and_nothing_is_committed(there):
    (memory, manifest), _ = copies_of(1, 2, step=6)
    _, (old_memory, old) = copies_of(1, 2, step=5)
    assert there.peer().put(PLACE, manifest, memory, pace=no_pace, members=MEMBERS) == []
    with pytest.raises(PeerTrouble, match=r"did not take it: slot 1 sent step 5 .* have sent step 6"):
        there.peer().put(PLACE, old, old_memory, pace=no_pace, members=MEMBERS)
    assert list(there.store.found()) == []


def test_a_newer_version_replaces_an_incomplete_one(there):
    lone = copies_of(1, 2, step=5)[0]
    assert there.peer().put(PLACE, lone[1], lone[0], pace=no_pace, members=MEMBERS) == []
    copies = copies_of(3, 4, step=6, sizes=(500, 900))
    for memory, manifest in copies:
        assert there.peer().put(PLACE, manifest, memory, pace=no_pace, members=MEMBERS) == []
    assert there.store.manifest(PLACE).version.step == 6
    assert torch.equal(bytes_of(there.store, PLACE), xor(bytes_of(there.store, PLACE) * 0, *(one for one, _ in copies)))


@pytest.mark.parametrize("other", [(0, 1, 2), (0, 2)])
def test_members_with_another_member_list_are_refused(there, other):
    copies = copies_of(1, 2)
    there.peer().put(PLACE, copies[0][1], copies[0][0], pace=no_pace, members=MEMBERS)
    with pytest.raises(PeerTrouble, match=r"slot 1 names .* as members of its parity"):
        there.peer().put(PLACE, copies[1][1], copies[1][0], pace=no_pace, members=other)
    changed, _ = copies_of(7, 2)
    with pytest.raises(PeerTrouble, match=r"slot 0 sent step 5 .* before, with another state"):
        there.peer().put(PLACE, changed[1], changed[0], pace=no_pace, members=MEMBERS)
    assert list(there.store.found()) == []


def test_folding_into_a_closed_version_leaves_the_next_unchanged(tmp_path):
    """A connection that seemed broken continues after a newer version has begun."""
    store, old, new = Store(tmp_path), copies_of(1, 2, step=5), copies_of(3, 4, step=6)
    parities = ParityStore(store)

    def late():
        first, *others = batches_of(*old[0])
        yield first
        assert parities.take(PLACE, MEMBERS, new[0][1], batches_of(*new[0])) == []
        yield from others

    with pytest.raises(Unwanted, match="while a newer version was begun"):
        parities.take(PLACE, MEMBERS, old[0][1], late())
    parities.take(PLACE, MEMBERS, new[1][1], batches_of(*new[1]))
    assert is_parity_of(store, PLACE, *new)
    store.close()


# ---------------------------------------------------------------- in turns


def test_two_alternating_versions_are_kept_in_the_gth_part_of_the_memory(tmp_path, there):
    """A parity takes a part of the room of far copies of three members."""
    with contextlib.ExitStack() as running:
        members = [running.enter_context(closing(Here(tmp_path / f"{slot}"))) for slot in range(3)]
        for slot, here in enumerate(members):
            here.replicator._slot = slot
            here.replicator.send_to([there.server.address], members=(0, 1, 2))
        seen, inodes = [], set()
        for step in range(5, 10):
            for slot, here in enumerate(members):
                here.replicator.begin(snapshot(step, parts=some_parts(step + 100 * slot)))
            for here in members:
                until(lambda here=here: here.replicator.through)
                assert here.replicator.ok, here.trouble
                here.replicator.commit()
            seen.append({place.number: version.step for place, version, _ in there.store.versions()})
            assert all(wrong_in(there.store, place) == [] for place, _ in there.store.found())
            if step > 6:
                inodes |= {path.stat().st_ino for path in there.store.folder.glob("parity-0-e2-?")}
        assert seen == [{0: 5}, {0: 5, 1: 6}, {0: 7, 1: 6}, {0: 7, 1: 8}, {0: 9, 1: 8}]
        assert len(inodes) == 2, "the files stay"
        size = members[0].store.manifest(CopyKey(kind=NEAR, slot=0, epoch=2, number=0)).size
        files = sum(path.stat().st_size for path in there.store.folder.glob("parity-0-e2-?"))
        assert files == 2 * size, "three members' far copies would take six times that"
        assert there.store.used == 3 * size, "with room for one member"


def test_a_parity_is_named_after_its_first_member():
    near = CopyKey(kind=NEAR, slot=7, epoch=3, number=1)
    assert parity_place(near, (2, 7)) == CopyKey(kind=PARITY, slot=2, epoch=3, number=1)
