"""One version out of a store that others write to."""

import dataclasses
import threading

import pytest
import torch

from ntp_plugin.copies import excerpt
from ntp_plugin.copies.manifest import Version
from ntp_plugin.copies.store import FAR, NEAR, CopyKey, NoRoom, Store
from ntp_plugin.errors import NtpError, Refused
from tests.mounted import disk
from tests.unit.copies_bytes import wrong_in
from tests.unit.test_copies_store import written

SLOTS = (3, 4)


def keep(store, step, *, slots=SLOTS, kind=NEAR, size=64):
    """A version of slots 3 and 4, as replicators write it: where the older of two was."""
    for slot in slots:
        place = CopyKey(kind=kind, slot=slot, epoch=2, number=step % 2)
        memory, manifest = written({"w": torch.full((size,), float(step))}, step=step, slot=slot)
        store.open(place, manifest.size).copy_(memory)
        store.complete(place, dataclasses.replace(manifest, holders=SLOTS))


@pytest.fixture
def stores(tmp_path):
    return Store(tmp_path / "from"), Store(tmp_path / "into")


def test_the_newest_complete_version_is_taken(stores):
    store, into = stores
    for step in (4, 5):
        keep(store, step)
    keep(store, 6, slots=(3,))
    assert excerpt.take(store, into) == Version(step=5, epoch=2)
    assert [(place.slot, version.step) for place, version, _ in into.versions()] == [(3, 5), (4, 5)]
    assert not any(wrong_in(into, place) for place, _ in into.found())


def test_copies_kept_by_others_are_as_good(stores):
    store, into = stores
    keep(store, 4, slots=(3,))
    keep(store, 4, kind=FAR)
    excerpt.take(store, into)
    assert [(place.kind, place.slot) for place, _ in into.found()] == [(FAR, 4), (NEAR, 3)]


def test_missing_parts_are_named(stores):
    store, into = stores
    with pytest.raises(Refused, match="has no copies"):
        excerpt.take(store, into)
    keep(store, 4, slots=(3,))
    with pytest.raises(Refused, match=r"lacks parts of step 4 .*: those of slots 4"):
        excerpt.take(store, into)


def test_a_copy_that_is_being_overwritten_is_not_copied(stores):
    """The run begins to write there after the manifest was read, and before the bytes are."""

    class Slow(Store):
        def open(self, place, size):
            store.open(place, size).fill_(9)
            return super().open(place, size)

    store, into = stores
    keep(store, 4)
    place = CopyKey(kind=NEAR, slot=3, epoch=2, number=0)
    assert store.copy(place, into)
    slow = Slow(into.folder / "slow")
    assert not store.copy(place, slow)
    assert not list(slow.found())


def test_an_excerpt_of_a_living_run_is_complete(stores):
    """Another process writes three versions during an excerpt, whose digests must be those of its version."""
    store, into = stores
    keep(store, 0, size=1 << 16)
    over, steps, taken = threading.Event(), threading.Semaphore(3), []

    def train():
        of_the_run, step = Store(store.folder), 1
        while steps.acquire() and not over.is_set():
            keep(of_the_run, step, size=1 << 16)
            step += 1

    training = threading.Thread(target=train)
    training.start()
    try:
        while len(set(taken)) < 10:
            try:
                taken.append(excerpt.take(store, into).step)
            except NtpError as error:  # both versions are being written just now
                assert "each version was overwritten" in str(error) or isinstance(error, Refused), error
                continue
            assert not any(wrong_in(into, place) for place, _ in into.found())
            assert [version.step for _, version, _ in into.versions()] == taken[-1:] * 2
            into.forget_all()
            steps.release(3)
    finally:
        over.set()
        steps.release()
        training.join()


def test_half_of_the_free_memory_is_left_to_the_run(tmp_path):
    store = Store(tmp_path / "from")
    keep(store, 4, size=1 << 16)  # half a megabyte
    with disk(tmp_path / "small", "900k") as folder, pytest.raises(NoRoom, match=r"0\.5 MB would be copied"):
        excerpt.take(store, Store(folder / "host-0"))
    with disk(tmp_path / "larger", "2m") as folder:
        assert excerpt.take(store, Store(folder / "host-0")).step == 4
