"""Copies during training: of the state at their beginning, alternating between two, whatever other hosts do."""

import dataclasses
import shutil
import socket
import time
from contextlib import closing

import pytest
import torch

from ntp_plugin.copies import digest, replicator, wire
from ntp_plugin.copies.manifest import Version, view
from ntp_plugin.copies.replicator import Lateness, Part, Replicator, Snapshot
from ntp_plugin.copies.runs import Runs
from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.copies.store import FAR, NEAR, CopyKey, Store
from tests.patience import PATIENCE_S, until
from tests.unit.copies_bytes import bytes_of, wrong_in
from tests.unit.test_copies_wire import CREDENTIALS, SECRET, There, as_server, deaf_server

SLOT = 3


def near(epoch, number):
    return CopyKey(kind=NEAR, slot=SLOT, epoch=epoch, number=number)


def far(epoch, number):
    return CopyKey(kind=FAR, slot=SLOT, epoch=epoch, number=number)


def some_parts(seed, rows=100):
    """A part of each of two tensors, with the dtypes that mixed precision has."""
    generator = torch.Generator().manual_seed(seed)
    slices = [
        TensorSlice(tensor="a", shape=(rows, 40), dim=1, ranges=((30, 40), (0, 10)), start=0, stop=20 * rows),
        TensorSlice(tensor="b", shape=(70,), dim=0, ranges=((0, 70),), start=11, stop=50, whole="1"),
    ]
    dtypes = {"main": torch.float32, "moment": torch.bfloat16}
    return [
        Part(
            tensor_slice=tensor_slice,
            values={
                name: torch.randn(tensor_slice.size, generator=generator).to(dtype) for name, dtype in dtypes.items()
            },
            numbers={"step": seed},
        )
        for tensor_slice in slices
    ]


def snapshot(step, *, epoch=2, parts=None):
    return Snapshot(
        version=Version(step=step, epoch=epoch),
        holders=(1, SLOT),
        parts=some_parts(step) if parts is None else parts,
        extras={"consumed": 8 * step},
    )


def kept(parts):
    return [{name: live.clone() for name, live in part.values.items()} for part in parts]


def shown(store, place):
    """The contents of a copy, part by part."""
    manifest, memory = store.manifest(place), bytes_of(store, place)
    assert manifest is not None
    assert wrong_in(store, place) == []
    return [{entry.name: view(memory, held, entry) for entry in held.entries} for held in manifest.held]


def same(found, expected):
    return all(
        one.keys() == other.keys()
        and all(one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(found, expected, strict=True)
    )


class Here:
    """A replicator, its store, and its reports."""

    def __init__(self, folder, *, at_most=None, **options):
        self.store, self.trouble, self.copied = Store(folder, at_most=at_most), [], []
        self.replicator = Replicator(
            self.store,
            run="run",
            secret=SECRET,
            slot=SLOT,
            trouble=self.trouble.append,
            done=self.copied.append,
            **{"timeout_s": 20.0} | options,
        )

    def copy(self, snapshot):
        self.replicator.begin(snapshot)
        until(lambda: self.replicator.through)
        return self.replicator.ok

    def close(self):
        self.replicator.close()
        self.store.close()


@pytest.fixture(params=["by machine code", "by NumPy and torch"])
def _either_way(request, monkeypatch):
    if request.param == "by NumPy and torch":
        for module in (replicator, digest):
            monkeypatch.setattr(module, "machine", lambda: None)


@pytest.fixture
def here(tmp_path):
    with closing(Here(tmp_path / "here")) as here:
        yield here


@pytest.fixture
def there(tmp_path):
    with closing(There(tmp_path / "there")) as there:
        yield there


def test_bytes_among_the_extras_are_reported_as_digits(here):
    drawn = torch.get_rng_state().numpy().tobytes()
    assert here.copy(dataclasses.replace(snapshot(5), extras={"random": {"torch": drawn}}))
    ((_, manifest),) = here.store.found()
    assert bytes.fromhex(manifest.extras["random"]["torch"]) == drawn


@pytest.mark.usefixtures("_either_way")
def test_a_snapshot_becomes_a_copy_on_the_own_host(here):
    parts = some_parts(5)
    assert here.copy(snapshot(5, parts=parts))
    ((place, manifest),) = here.store.found()
    assert place == near(2, 0)
    assert (manifest.run, manifest.slot, manifest.holders) == ("run", SLOT, (1, SLOT))
    assert (manifest.version, manifest.extras) == (Version(step=5, epoch=2), {"consumed": 40})
    assert [(held.tensor_slice, held.numbers) for held in manifest.held] == [
        (part.tensor_slice, {"step": 5}) for part in parts
    ]
    assert same(shown(here.store, place), kept(parts))
    (copied,) = here.copied
    assert (copied.step, copied.size, copied.far) == (5, manifest.size, 0)
    assert here.trouble == []


def test_a_snapshot_is_independent_of_later_changes(here, there):
    """A large one, so that a copy which is not there yet would show it."""
    parts = some_parts(5, rows=100_000)
    before = kept(parts)
    here.replicator.send_to([there.server.address])
    here.replicator.begin(snapshot(5, parts=parts))
    here.replicator.wait_until_taken()
    for part in parts:
        for live in part.values.values():
            live.zero_()
    until(lambda: here.replicator.through)
    assert here.replicator.ok
    assert same(shown(here.store, near(2, 0)), before)
    assert same(shown(there.store, far(2, 0)), before)


def bytes_in(store, place):
    """Bytes of all values of a copy, in their order."""
    memory = bytes_of(store, place)
    entries = [(held, entry) for held in store.manifest(place).held for entry in held.entries]
    return torch.cat([memory[entry.offset : entry.offset + held.bytes_of(entry)] for held, entry in entries])


@pytest.mark.usefixtures("_either_way")
@pytest.mark.parametrize("chunk", [500, 501, 4096, 40_000])
def test_copies_of_many_chunks_are_the_state_byte_for_byte(here, there, monkeypatch, chunk):
    """Near, far, and requested parts of the far one; 501 is no multiple of the element size, 40,000 half of a
    tensor."""
    for module in (replicator, wire):
        monkeypatch.setattr(module, "CHUNK", chunk)
    parts = some_parts(5, rows=1000)
    state = torch.cat([live.view(torch.uint8) for part in parts for live in part.values.values()])
    here.replicator.send_to([there.server.address])
    assert here.copy(snapshot(5, parts=parts))
    for store, place in ((here.store, near(2, 0)), (there.store, far(2, 0))):
        assert store.manifest(place).size > 2 * chunk
        assert torch.equal(bytes_in(store, place), state)
        assert wrong_in(store, place) == []
    held = there.store.manifest(far(2, 0)).held[0]
    of_all = Runs(starts=torch.tensor([0, 5]), lengths=torch.tensor([5, held.tensor_slice.size - 5]))
    asked = there.peer().get(far(2, 0), 0, held, of_all)
    assert all(
        torch.equal(asked[name].view(torch.uint8), live.view(torch.uint8)) for name, live in parts[0].values.items()
    )


def test_far_copies_arrive_at_all_their_holders(here, there, tmp_path):
    with closing(There(tmp_path / "elsewhere")) as elsewhere:
        here.replicator.send_to([there.server.address, elsewhere.server.address])
        for step in (5, 6, 7):
            parts = some_parts(step)
            assert here.copy(snapshot(step, parts=parts))
            here.replicator.commit()
            for each in (there, elsewhere):
                assert same(shown(each.store, far(2, (step - 5) % 2)), kept(parts))
        assert [copied.far for copied in here.copied] == [2] * 3
        assert {version.step for _, version, _ in elsewhere.store.versions()} == {6, 7}
        here.replicator.send_to([there.server.address])
        assert here.copy(snapshot(8))
        assert {version.step for _, version, _ in elsewhere.store.versions()} == {6, 7}, "it keeps them no more"
        assert {version.step for _, version, _ in there.store.versions()} == {7, 8}


def test_the_next_snapshot_leaves_the_committed_copy(here):
    seen = []
    for step in (5, 6, 7, 8):
        assert here.copy(snapshot(step))
        here.replicator.commit()
        seen.append({place.number: version.step for place, version, _ in here.store.versions()})
    assert seen == [{0: 5}, {0: 5, 1: 6}, {0: 7, 1: 6}, {0: 7, 1: 8}]
    path = here.store.folder / str(near(2, 1))
    before = path.read_bytes(), path.stat().st_mtime_ns
    for step in (9, 10):
        assert here.copy(snapshot(step))
        assert here.store.manifest(near(2, 0)).version.step == step, "it was not committed: the same one is used again"
        assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_a_commit_in_a_newer_epoch_removes_older_copies(here):
    for step, epoch in [(5, 2), (6, 2), (7, 4)]:
        assert here.copy(snapshot(step, epoch=epoch))
        if epoch == 2:
            here.replicator.commit()
    others = [CopyKey(kind=FAR, slot=9, epoch=epoch, number=1) for epoch in (1, 2, 4)]
    for other in others:
        here.store.open(other, 10)
        here.store.complete(other, here.store.manifest(near(4, 0)))
    assert {place.epoch for place, _ in here.store.found()} == {2, 4}, "until it is committed"
    here.replicator.commit()
    assert {path.name for path in here.store.folder.iterdir()} == {
        f"{place}{end}" for place in (near(4, 0), others[2]) for end in ("", ".json")
    }
    assert here.copy(snapshot(8, epoch=4))
    assert {version.step for place, version, _ in here.store.versions() if place.kind == NEAR} == {7, 8}


def test_the_first_commit_of_a_joiner_removes_copies_of_older_epochs(here, tmp_path):
    with closing(Here(tmp_path / "here")) as dead:
        assert dead.copy(snapshot(5, epoch=2))
        dead.replicator.commit()
    assert here.copy(snapshot(6, epoch=3))
    here.replicator.commit()
    assert {version.epoch for _, version, _ in here.store.versions()} == {3}


def closed_address():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return closed.getsockname()


def test_a_missing_peer_is_reported_and_the_next_snapshot_is_made(here, there):
    here.replicator.send_to([closed_address(), there.server.address])
    for step in (5, 6):
        assert not here.copy(snapshot(step))
        assert len(here.trouble) == step - 4
        assert "was not copied: the process at 127.0.0.1" in here.trouble[-1]
        assert here.store.manifest(near(2, 0)).version.step == step
        assert there.store.manifest(far(2, 0)).version.step == step, "the others get theirs"
    assert [copied.far for copied in here.copied] == [1] * 2
    here.replicator.send_to([there.server.address])
    assert here.copy(snapshot(7)), "nothing is wrong any more"


def test_a_returning_peer_gets_copies_again(here, there, tmp_path):
    """Its process closes the connection, and its successor listens at the same address."""
    with closing(There(tmp_path / "elsewhere")) as elsewhere:
        here.replicator.send_to([elsewhere.server.address])
        assert here.copy(snapshot(5))
    assert not here.copy(snapshot(6))
    assert here.trouble
    here.replicator.send_to([there.server.address])
    assert here.copy(snapshot(7))


def test_a_full_memory_is_reported_and_the_next_snapshot_is_made(tmp_path):
    with closing(Here(tmp_path, at_most=20_000)) as here:
        assert not here.copy(snapshot(5, parts=some_parts(5, rows=1000)))
        (message,) = here.trouble
        assert "max_host_gb" in message
        assert list(here.store.found()) == []
        assert here.copy(snapshot(6))


def test_a_full_peer_is_reported(here, tmp_path):
    with closing(There(tmp_path / "there", at_most=100)) as there:
        here.replicator.send_to([there.server.address])
        assert not here.copy(snapshot(5))
        (message,) = here.trouble
        assert "has no room" in message
        assert here.store.manifest(near(2, 0)) is not None


def test_memory_errors_are_reported_and_training_continues(tmp_path):
    with closing(Here(tmp_path / "here")) as here:
        shutil.rmtree(here.store.folder)
        here.copy(snapshot(5))
        assert here.trouble
        assert not here.replicator.ok
        here.store.folder.mkdir()
        assert here.copy(snapshot(6))


def test_a_copy_goes_no_faster_than_it_may(tmp_path, there):
    with closing(Here(tmp_path / "here", bytes_per_s=5e6)) as here:
        here.replicator.send_to([there.server.address])
        assert here.copy(snapshot(5, parts=some_parts(5, rows=10_000)))
        (copied,) = here.copied
        assert copied.seconds > copied.size / 5e6 > 0.2
        assert copied.taken_s < copied.seconds


def test_a_late_copy_is_news_until_a_copy_is_in_time():
    lateness = Lateness(after_s=10)
    assert [lateness.is_news(seconds) for seconds in (3, 9.9, 10, 11, 50)] == [False, False, True, False, False]
    lateness.ended(60, ok=True)
    assert not lateness.is_news(11), "the next one is late as well"
    lateness.ended(3, ok=False)
    assert not lateness.is_news(11), "one that was refused does not say that others are quick"
    lateness.ended(3, ok=True)
    assert lateness.is_news(11)


def test_a_slow_copy_is_reported_once_until_a_copy_is_in_time(tmp_path, there):
    with closing(Here(tmp_path / "here", bytes_per_s=5e4, timeout_s=0.2)) as here:
        here.replicator.send_to([there.server.address])
        for step in (5, 6):
            assert here.copy(snapshot(step)), "it is made, whatever it takes"
        (message,) = here.trouble
        assert message.startswith("step 5 as laid out in epoch 2 is not copied after 0.2 s, by slot 3 to 127.0.0.1:")
        here.replicator.send_to([])
        assert here.copy(snapshot(7))
        here.replicator.send_to([there.server.address])
        assert here.copy(snapshot(8))
        assert [message.split(" as ")[0] for message in here.trouble] == ["step 5", "step 8"]


def test_a_frozen_peer_is_reported_before_it_is_given_up(tmp_path):
    with deaf_server() as (_, address), closing(Here(tmp_path, timeout_s=0.3)) as here:
        here.replicator.send_to([address])
        assert not here.copy(snapshot(5, parts=some_parts(5, rows=200_000)))
        late, given_up = here.trouble
        assert "is not copied after 0.3 s" in late
        assert "was not copied" in given_up


def test_training_does_not_wait_for_a_slow_copy(tmp_path, there):
    """The first one is waited for, until it is late; a recovery, and who closes, ends it: at this pace it takes an
    hour."""
    with closing(Here(tmp_path / "here", bytes_per_s=10.0, timeout_s=0.2)) as here:
        here.replicator.send_to([there.server.address])
        here.replicator.begin(snapshot(5))
        began = time.monotonic()
        here.replicator.wait_until_late()
        here.replicator.wait_until_taken()
        assert not here.replicator.through
        here.replicator.hold()
        until(lambda: here.replicator.through)
        here.replicator.begin(snapshot(6))
    assert time.monotonic() - began < PATIENCE_S


def test_a_recovery_does_not_wait_for_a_peer_that_is_frozen(tmp_path):
    parts = some_parts(5, rows=200_000)
    with deaf_server() as (listening, address), closing(Here(tmp_path, timeout_s=2 * PATIENCE_S)) as here:
        here.replicator.send_to([address])
        here.replicator.begin(snapshot(5, parts=parts))
        connection, _ = listening.accept()
        with connection:
            as_server(connection, CREDENTIALS)
            assert connection.recv(1, socket.MSG_PEEK), "it is on its way"
            assert not here.replicator.through
            began = time.monotonic()
            here.replicator.hold()
            assert time.monotonic() - began < PATIENCE_S
            assert here.store.manifest(near(2, 0)).size > 20_000_000, "the own host's copy is there"
            until(lambda: here.replicator.through)
        assert not here.replicator.ok
        assert "was not copied" in here.trouble[0]
        here.replicator.send_to([])
        assert here.copy(snapshot(6))


def test_a_recovery_also_drops_copies_that_are_not_sent_yet(tmp_path):
    """Two that keep the copy are frozen: the next snapshot waits for neither."""
    with (
        deaf_server() as (one, first),
        deaf_server() as (_, second),
        closing(Here(tmp_path, timeout_s=2 * PATIENCE_S)) as here,
    ):
        here.replicator.send_to([first, second])
        here.replicator.begin(snapshot(5))
        connection, _ = one.accept()
        with connection:
            as_server(connection, CREDENTIALS)
            assert connection.recv(1, socket.MSG_PEEK)
            here.replicator.hold()
            until(lambda: here.replicator.through)


def test_a_recovery_costs_no_far_copy_after_it(here, there):
    here.replicator.send_to([there.server.address])
    assert here.copy(snapshot(5))
    here.replicator.hold()
    here.replicator.send_to([there.server.address])
    assert here.copy(snapshot(6, epoch=3))


@pytest.mark.usefixtures("_either_way")
@pytest.mark.parametrize("part", [0, -1])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_state_that_is_not_finite_is_not_copied_and_the_committed_copy_stays(here, value, part):
    for step in (5, 6):
        assert here.copy(snapshot(step))
        here.replicator.commit()
    parts = some_parts(7)
    name, values = list(parts[part].values.items())[part]
    values.view(-1)[3] = value
    assert not here.copy(snapshot(7, parts=parts))
    assert f"{parts[part].tensor_slice.tensor} ({name}) is not finite after step 7" in here.trouble[-1]
    assert [version.step for _, version, _ in here.store.versions()] == [6]
    assert here.copy(snapshot(8))
    assert {version.step for _, version, _ in here.store.versions()} == {6, 8}


def test_an_idle_replicator_holds_and_closes(tmp_path):
    with closing(Here(tmp_path)) as here:
        here.replicator.hold()
        here.replicator.wait_until_taken()
        assert here.replicator.through
        assert here.replicator.ok
    assert not any(thread.is_alive() for thread in here.replicator._threads)


def test_near_copies_are_kept_while_far_copies_do_not_arrive(here):
    """This keeps a complete and recent version while the next is taken."""
    here.replicator.send_to([closed_address()])
    places = []
    for step in (5, 6, 7, 8):
        here.copy(snapshot(step))
        assert (here.replicator.near, here.replicator.ok) == (True, False)
        here.replicator.keep()
        places.append(newest(here.store))
    assert [place.number for place in places] == [0, 1, 0, 1]
    here.replicator.begin(snapshot(9))
    here.replicator.wait()
    assert {manifest.version.step for _, manifest in here.store.found()} == {8, 9}


def test_the_committed_copy_is_not_replaced_by_a_kept_one(here, there):
    """A lost host needs it: its far copies are of no newer version."""
    here.replicator.send_to([there.server.address])
    here.copy(snapshot(5))
    here.replicator.commit()
    here.replicator.send_to([closed_address()])
    for step in (6, 7, 8):
        here.copy(snapshot(step))
        here.replicator.keep()
        assert {5, step} <= {manifest.version.step for _, manifest in here.store.found()}
    here.replicator.send_to([there.server.address])
    for step in (9, 10, 11):
        here.copy(snapshot(step))
        here.replicator.commit()
        assert {manifest.version.step for _, manifest in there.store.found()} >= {step}
        assert same(shown(here.store, newest(here.store)), kept(some_parts(step)))
    assert len([path for path in here.store.folder.iterdir() if not path.suffix]) == 2, "the third one is let go of"


def test_without_room_for_a_third_copy_there_are_two_by_turns(tmp_path):
    one = sum(live.nbytes for part in some_parts(0) for live in part.values.values())
    here = Here(tmp_path / "here", at_most=int(2.5 * one))
    with closing(here.replicator):
        here.replicator.send_to([closed_address()])
        here.copy(snapshot(5))
        here.replicator.commit()
        for step in (6, 7, 8, 9):
            here.copy(snapshot(step))
            if here.replicator.near:
                here.replicator.keep()
        assert {manifest.version.step for _, manifest in here.store.found()} == {5, 9}
        assert len([what for what in here.trouble if "max_host_gb" in what]) == 1


def newest(store):
    return max(store.found(), key=lambda pair: pair[1].version.step)[0]
