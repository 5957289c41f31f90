"""Parities on real stores and sockets: what any one member had comes out again, and nothing that is wrong is used."""

import contextlib
import dataclasses
import json
from contextlib import closing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ntp_plugin.copies import parity, wire
from ntp_plugin.copies.manifest import Version, views
from ntp_plugin.copies.parity import Parities, Unwanted, WrongParity, fold, members_of, parity_place, rebuild
from ntp_plugin.copies.restore import describe, standable
from ntp_plugin.copies.store import FAR, NEAR, PARITY, REBUILT, NoRoom, Place, Store
from ntp_plugin.copies.wire import PeerTrouble
from ntp_plugin.errors import StateLost
from tests.unit.copies_bytes import bytes_of, mapped, wrong_in
from tests.unit.test_copies_replicator import Here, snapshot, some_parts
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
from tests.unit.test_copies_wire import There, no_pace, until

MEMBERS = (0, 1)
PLACE = Place(kind=PARITY, slot=0, epoch=2, number=0)


def xor(*parts):
    """Of bytes of several lengths, with zeros behind the shorter ones."""
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


def pieces_of(memory, manifest):
    """As they come, one by one."""
    return [[(held, views(memory, held))] for held in manifest.held]


def is_parity_of(store, place, *copies):
    return torch.equal(bytes_of(store, place)[: store.manifest(place).size], xor(*(memory for memory, _ in copies)))


@pytest.fixture
def there(tmp_path):
    with closing(There(tmp_path / "there")) as there:
        yield there


# ---------------------------------------------------------------- keeping


def test_a_parity_is_there_when_all_members_are_in_and_not_before(there):
    first, second = copies_of(1, 2)
    for peer, (memory, manifest) in zip((there.peer(), there.peer()), (second, first), strict=True):
        assert list(there.store.found()) == []
        assert peer.put(PLACE, manifest, memory, pace=no_pace, members=MEMBERS) == []
    ((place, parity),) = there.store.found()
    assert (place, parity.version, parity.holders) == (PLACE, Version(step=5, epoch=2), (0, 9))
    assert members_of(parity) == (first[1], second[1])
    assert is_parity_of(there.store, PLACE, first, second), "and the later one was longer"
    assert wrong_in(there.store, PLACE) == []
    assert there.told == []
    mapped(there.store, PLACE)[77] ^= 4
    assert wrong_in(there.store, PLACE) == ["parity (xor)"]


def break_off(after):
    """A pace at which the connection breaks, `after` so many chunks."""
    left = iter(range(after))

    def pace(_):
        if next(left, None) is None:
            raise ConnectionResetError("as if a cable were pulled")

    return pace


def send_in_pieces(there, copies, breaks):
    """All members' copies, of the first again and again where it breaks off."""
    for number, (memory, manifest) in enumerate(copies):
        for after in breaks if number == 0 else ():
            with pytest.raises(PeerTrouble, match="as if a cable were pulled"):
                there.peer().put(PLACE, manifest, memory, pace=break_off(after), members=MEMBERS)
            until(lambda: not there.server._open)
        assert there.peer().put(PLACE, manifest, memory, pace=no_pace, members=MEMBERS) == []


def test_a_piece_without_values_is_taken_like_any_other(there):
    copies = [
        (
            memory,
            dataclasses.replace(manifest, held=(nothing, *manifest.held[:1], nothing, *manifest.held[1:], nothing)),
        )
        for memory, manifest in copies_of(1, 2)
        for nothing in [dataclasses.replace(manifest.held[0], entries=())]
    ]
    send_in_pieces(there, copies, ())
    assert is_parity_of(there.store, PLACE, *copies)


@pytest.mark.parametrize("batch", [500, 1 << 20], ids=["one by one", "at once"])
@pytest.mark.parametrize("breaks", [(0,), (3,), (23,), (23, 1, 20), (24, 24)])
def test_what_is_sent_again_after_a_broken_connection_is_in_once(there, monkeypatch, breaks, batch):
    monkeypatch.setattr(wire, "CHUNK", 500)
    monkeypatch.setattr(wire, "_BATCH", batch)
    copies = copies_of(1, 2)
    first, second, _ = copies[0][1].held
    assert first.bytes_of(first.entries[0]) == 500 * 24, "it breaks off in the first piece, behind it, and in the end"
    assert second.entries[0].offset < copies[0][1].size <= 500 * 25
    send_in_pieces(there, copies, breaks)
    until(lambda: len(list(there.store.found())) == 1)
    assert is_parity_of(there.store, PLACE, *copies)


def test_it_is_noticed_if_pieces_are_folded_twice(there, monkeypatch):
    """A negative control: pieces that are in are folded again, which takes them out."""
    sound = Parities._fold_once

    def forgetful(self, place, staged, manifest, *piece):
        staged.folded[manifest.slot] = piece[0]
        sound(self, place, staged, manifest, *piece)

    monkeypatch.setattr(Parities, "_fold_once", forgetful)
    monkeypatch.setattr(wire, "CHUNK", 500)
    monkeypatch.setattr(wire, "_BATCH", 500)
    copies = copies_of(1, 2)
    send_in_pieces(there, copies, [23])
    assert not is_parity_of(there.store, PLACE, *copies)


def test_what_comes_again_though_it_had_arrived_changes_nothing(there):
    """The answer was lost."""
    copies = copies_of(1, 2)
    for memory, manifest in [*copies, *copies]:
        assert there.peer().put(PLACE, manifest, memory, pace=no_pace, members=MEMBERS) == []
    assert is_parity_of(there.store, PLACE, *copies)


def test_a_piece_that_does_not_come_as_it_was_is_not_in(there):
    copies = copies_of(1, 2)
    memory, manifest = copies[0]
    flipped = memory.clone()
    flipped[manifest.held[1].entries[0].offset] ^= 8
    peer = there.peer()
    assert peer.put(PLACE, manifest, flipped, pace=no_pace, members=MEMBERS) == ["b (weight)"]
    assert there.told == ["slot 0 sent b (weight) of step 5 as laid out in epoch 2 and it did not come as it was"]
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


def test_a_newer_version_takes_the_place_of_one_that_was_never_whole(there):
    lone = copies_of(1, 2, step=5)[0]
    assert there.peer().put(PLACE, lone[1], lone[0], pace=no_pace, members=MEMBERS) == []
    copies = copies_of(3, 4, step=6, sizes=(500, 900))
    for memory, manifest in copies:
        assert there.peer().put(PLACE, manifest, memory, pace=no_pace, members=MEMBERS) == []
    assert there.store.manifest(PLACE).version.step == 6
    assert torch.equal(bytes_of(there.store, PLACE), xor(bytes_of(there.store, PLACE) * 0, *(one for one, _ in copies)))


@pytest.mark.parametrize("other", [(0, 1, 2), (0, 2)])
def test_members_that_name_others_are_refused(there, other):
    copies = copies_of(1, 2)
    there.peer().put(PLACE, copies[0][1], copies[0][0], pace=no_pace, members=MEMBERS)
    with pytest.raises(PeerTrouble, match="slot 1 shares a parity with"):
        there.peer().put(PLACE, copies[1][1], copies[1][0], pace=no_pace, members=other)
    changed, _ = copies_of(7, 2)
    with pytest.raises(PeerTrouble, match=r"slot 0 sent step 5 .* before, and it was another state"):
        there.peer().put(PLACE, changed[1], changed[0], pace=no_pace, members=MEMBERS)
    assert list(there.store.found()) == []


def test_what_is_folded_into_a_version_that_is_over_does_not_come_into_the_next(tmp_path):
    """A connection that was thought broken goes on while a newer version has begun."""
    store, old, new = Store(tmp_path), copies_of(1, 2, step=5), copies_of(3, 4, step=6)
    parities = Parities(store)

    def late():
        first, *others = pieces_of(*old[0])
        yield first
        assert parities.take(PLACE, MEMBERS, new[0][1], pieces_of(*new[0])) == []
        yield from others

    with pytest.raises(Unwanted, match="while a newer version was begun"):
        parities.take(PLACE, MEMBERS, old[0][1], late())
    parities.take(PLACE, MEMBERS, new[1][1], pieces_of(*new[1]))
    assert is_parity_of(store, PLACE, *new)
    store.close()


# ---------------------------------------------------------------- in turns


def test_two_versions_are_kept_by_turns_and_the_memory_is_the_gth_part(tmp_path, there):
    """Of what far copies of three members would take."""
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
        size = members[0].store.manifest(Place(kind=NEAR, slot=0, epoch=2, number=0)).size
        files = sum(path.stat().st_size for path in there.store.folder.glob("parity-0-e2-?"))
        assert files == 2 * size, "three members' far copies would take six times that"
        assert there.store.used == 3 * size, "with room for one member"


# ---------------------------------------------------------------- back again


@given(st.lists(st.integers(1, 300), min_size=1, max_size=3), st.integers(0, 4000), st.randoms())
def test_machine_code_folds_what_torch_folds(sizes, cut, dice):
    """Into bytes that end before the copy, within it, or after it."""
    if parity.machine() is None:
        pytest.skip("it was not built")
    memory, manifest = written({f"{size} of {at}": torch.zeros(size) for at, size in enumerate(sizes)})
    memory.copy_(torch.frombuffer(bytearray(dice.randbytes(len(memory))), dtype=torch.uint8))
    pieces = [(held, views(memory, held)) for held in manifest.held]
    parities = [torch.arange(cut, dtype=torch.int64).to(torch.uint8) for _ in range(2)]
    fold(parities[0], pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "machine", lambda: None)
        fold(parities[1], pieces)
    assert torch.equal(*parities)


def test_what_would_lie_before_the_bytes_is_not_folded():
    """A manifest may say anything, and machine code writes where it is told."""
    _, manifest = written(some_values())
    held = manifest.held[0]
    entry = dataclasses.replace(held.entries[0], offset=-64)
    room = torch.zeros(256, dtype=torch.uint8)
    values = {entry.name: torch.full((16,), 0xFF, dtype=torch.uint8)}
    fold(room[128:], [(dataclasses.replace(held, entries=(entry,)), values)])
    assert not room.any()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=2, max_size=5), st.data())
def test_any_member_comes_out_of_the_parity_and_the_others(tmp_path_factory, sizes, data):
    folder, members = tmp_path_factory.mktemp("parity"), tuple(range(len(sizes)))
    copies = copies_of(*range(10, 10 + len(sizes)), sizes=sizes)
    with closing(Store(folder)) as store:
        parities = Parities(store)
        for slot in data.draw(st.permutations(members)):
            parities.take(PLACE, members, copies[slot][1], pieces_of(*copies[slot]))
        lost = data.draw(st.sampled_from(members))
        memory, manifest = copies[lost]

        def read(other, number, held):
            assert other.slot != lost
            return views(copies[other.slot][0], held)

        place = rebuild(store, PLACE, store.manifest(PLACE), manifest, read)
        assert place == Place(kind=REBUILT, slot=lost, epoch=2, number=0)
        assert store.manifest(place) == manifest
        assert torch.equal(bytes_of(store, place)[: manifest.size], memory)
        mapped(store, PLACE)[manifest.held[0].entries[0].offset] ^= 1
        with pytest.raises(WrongParity, match=f"a \\(weight\\) of slot {lost} does not come out of it"):
            rebuild(store, PLACE, store.manifest(PLACE), manifest, read)
        assert store.manifest(place) is None, "nothing is left of it"


def test_a_full_host_is_told_before_a_loss_and_has_room_after_it(tmp_path):
    copies = copies_of(1, 2, sizes=(1000, 1000))
    size, other = copies[0][1].size, dataclasses.replace(PLACE, number=1)
    with closing(Store(tmp_path / "full", at_most=3 * size - 1)) as store:
        store.open(PLACE, size)
        with pytest.raises(NoRoom, match="max_host_gb"):
            store.open(other, size)
    with closing(Store(tmp_path / "enough", at_most=3 * size)) as store:
        parities = Parities(store)
        for place in (PLACE, other):
            for memory, manifest in copies:
                parities.take(place, MEMBERS, manifest, pieces_of(memory, manifest))
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
    """What those who are left are to have."""
    left = [process for process in processes if process.slot not in lost]
    return left, {process.slot: HALVES[number] for number, process in enumerate(left)}


def versions(processes):
    return standable([describe(process.store) for process in processes])


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


def test_nothing_is_put_together_where_all_copies_are_there(written_thirds):
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


def test_two_losses_in_one_group_are_no_version_and_said_to_be_lost(written_thirds):
    left, _ = without(written_thirds, 0, 1)
    assert versions(left) == []
    ((_, _, found),) = restore(left, {2: []})
    with pytest.raises(StateLost, match=r"the copies of step 5 .* of 0, 1 are gone"):
        found.kinds()


def test_a_version_whose_parity_lacks_a_member_does_not_stand_and_the_one_before_does(written_thirds):
    """The other member's part of it did not come through before the host was lost."""
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
def test_a_version_stands_if_each_slot_is_there_or_in_a_parity_with_all_others_there(there, group, stands):
    told = json.dumps([[5, 2, slot, [0, 1, 2]] for slot in there] + ([[5, 2, group, [0, 1, 2]]] if group else []))
    assert (standable([told]) == [VERSION]) == stands


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
def test_a_parity_that_is_wrong_is_named_and_the_version_before_is_had(written_thirds, tmp_path, damage):
    damage(tmp_path, 2)
    left, layout = without(written_thirds, 0)
    results = restore(left, layout)
    for found in results:
        assert isinstance(found, StateLost)
        assert "not as they were written: parity-0-e2-0 on host 2" in found.what
    assert any("parity-0-e2-0" in told for told in left[1].trouble)
    assert not any(place.kind == REBUILT for process in left for place, _ in process.store.found())
    assert_sound(restore(left, layout, version=OLDER), step=4)


def test_a_survivors_copy_that_is_wrong_is_named_and_the_version_before_is_had(written_thirds, tmp_path):
    corrupt(tmp_path, 1, copy_at(NEAR, 1), "row")
    left, layout = without(written_thirds, 0)
    for found in restore(left, layout):
        assert isinstance(found, StateLost)
        assert "not as they were written: near-1-e2-0 on host 1" in found.what
    assert_sound(restore(left, layout, version=OLDER), step=4)


def test_a_near_copy_that_is_wrong_is_put_together_anew(written_thirds, tmp_path):
    """Nobody is lost, and the far copy that is asked next is a parity."""
    corrupt(tmp_path, 1, copy_at(NEAR, 1), "row")
    results = restore(written_thirds, THIRDS)
    assert_sound(results)
    for done, _, _ in results:
        assert done.broken == ("near-1-e2-0 on host 1",)
        assert done.rebuilt == ("rebuilt-1-e2-0 on host 2",)


def test_a_host_without_room_for_what_is_rebuilt_says_so(written_thirds, tmp_path, monkeypatch):
    left, layout = without(written_thirds, 0)

    def full(self, place, size, sound=Store.open):
        if place.kind == REBUILT:
            raise NoRoom(f"{place} would take {size}")
        return sound(self, place, size)

    monkeypatch.setattr(Store, "open", full)
    (_, _, found), _ = restore(left, {slot: [] for slot in layout})
    with pytest.raises(StateLost, match=r"the copies of step 5 .* of 0 are gone"):
        found.kinds()
    assert any("rebuilt-0-e2-0 would take" in told for told in left[1].trouble)


def test_it_would_be_noticed_if_what_comes_out_were_not_verified(written_thirds, tmp_path, monkeypatch):
    """A negative control: a wrong parity is believed; the comparison in the end finds it."""
    flipped(tmp_path, 2)
    monkeypatch.setattr("ntp_plugin.copies.parity.wrong_of", lambda *_: [])
    monkeypatch.setattr("ntp_plugin.copies.restore.wrong", lambda *_: [])
    monkeypatch.setattr("ntp_plugin.copies.wire.wrong", lambda *_: [])
    monkeypatch.setattr("ntp_plugin.copies.parity.wrong_in", lambda *_: [])
    left, layout = without(written_thirds, 0)
    for found in restore(left, layout):
        assert isinstance(found, StateLost)
        assert "is not what was copied" in found.what


def test_a_parity_is_named_after_its_first_member():
    near = Place(kind=NEAR, slot=7, epoch=3, number=1)
    assert parity_place(near, (2, 7)) == Place(kind=PARITY, slot=2, epoch=3, number=1)
