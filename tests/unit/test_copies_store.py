"""Copies in a host's memory: complete or absent, whoever dies, and within the room that there is."""

import dataclasses
import hashlib
import os
import re
import signal
import stat
import subprocess
import sys

import pytest
import torch

from ntp_plugin.config.sections import CopyPolicy
from ntp_plugin.copies.digest import digest
from ntp_plugin.copies.layout import in_a_row, places
from ntp_plugin.copies.manifest import Manifest, Version, salt, view
from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.copies.store import FAR, NEAR, CopyKey, NoRoom, Store
from tests.unit.copies_bytes import bytes_of, wrong_in

PLACE = CopyKey(kind=NEAR, slot=3, epoch=2, number=0)

DIES = """
import os, signal, sys
from pathlib import Path
import torch
from ntp_plugin.copies.manifest import Manifest
from ntp_plugin.copies.store import CopyKey, Store
folder, manifest, memory, *names = sys.argv[1:]
store, manifest = Store(Path(folder)), Manifest.decode(Path(manifest).read_bytes())
memory = torch.frombuffer(bytearray(Path(memory).read_bytes()), dtype=torch.uint8)
for name in names:
    store.open(CopyKey.read(name), manifest.size).copy_(memory)
    store.complete(CopyKey.read(name), manifest)
store.open(CopyKey.read(name), manifest.size)[: manifest.size // 2] = 7
os.kill(os.getpid(), signal.SIGKILL)
"""


def written(values, *, step=5, epoch=2, slot=3, run="run"):
    """The bytes of a copy of these tensors, and its manifest."""
    slices, digests = [], []
    for name, value in values.items():
        shape = tuple(value.shape)
        slices.append(
            TensorSlice(tensor=name, shape=shape, dim=0, ranges=((0, shape[0]),), start=0, stop=value.numel())
        )
        digests.append(digest(value, slices[-1].runs, salt=salt(run, step, name, "weight")))
    kinds = [(("weight", value.dtype),) for value in values.values()]
    manifest = Manifest(
        run=run,
        version=Version(step=step, epoch=epoch),
        slot=slot,
        holders=(slot, 9),
        size=places([value.nbytes for value in values.values()])[1],
        layout=in_a_row(tuple(zip(slices, kinds, strict=True))),
        digests=tuple(digests),
        numbers=({"step": step},) * len(slices),
        extras={"consumed": 8 * step},
    )
    memory = torch.zeros(manifest.size, dtype=torch.uint8)
    for held, value in zip(manifest.held, values.values(), strict=True):
        view(memory, held, held.entries[0]).copy_(value.reshape(-1))
    return memory, manifest


def some_values(seed=0, size=1000):
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(size, 3, generator=generator),
        "b": torch.randn(7, generator=generator).to(torch.bfloat16),
        "c": torch.randn(2, 5, 3, generator=generator, dtype=torch.float64),
    }


def put(store, place, values=None, **version):
    memory, manifest = written(some_values() if values is None else values, **version)
    store.open(place, manifest.size).copy_(memory)
    store.complete(place, manifest)
    return memory, manifest


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "host")
    yield store
    store.close()


@pytest.fixture
def another(tmp_path):
    """The store as another process of the host sees it."""
    store = Store(tmp_path / "host")
    yield store
    store.close()


def test_a_copy_that_is_complete_is_found_by_all_of_the_host(store, another):
    memory, manifest = written(some_values())
    store.open(PLACE, manifest.size).copy_(memory)
    assert list(another.found()) == []
    assert another.manifest(PLACE) is None, "bytes alone are nothing"
    store.complete(PLACE, manifest)
    assert list(another.found()) == [(PLACE, manifest)]
    assert list(another.versions()) == [(PLACE, Version(step=5, epoch=2), (3, 9))]
    for each in (store, another):
        assert torch.equal(bytes_of(each, PLACE)[: manifest.size], memory)
        assert wrong_in(each, PLACE) == []


def test_a_place_that_is_opened_again_holds_no_copy_until_it_is_complete(store, another):
    put(store, PLACE)
    memory, manifest = written(some_values(1), step=6)
    store.open(PLACE, manifest.size).copy_(memory)
    assert list(another.found()) == []
    store.complete(PLACE, manifest)
    assert list(another.found()) == [(PLACE, manifest)]
    assert torch.equal(bytes_of(another, PLACE)[: manifest.size], memory)


def test_a_larger_copy_takes_the_place_of_a_smaller_one(store, another):
    put(store, PLACE)
    reader = bytes_of(another, PLACE)
    before = reader.clone()
    memory, manifest = put(store, PLACE, some_values(1, size=2000), step=6)
    assert list(another.found()) == [(PLACE, manifest)]
    assert torch.equal(bytes_of(another, PLACE)[: manifest.size], memory)
    assert torch.equal(reader, before), "a reader of the old bytes keeps them"


def test_a_copy_without_bytes_is_valid(store, another):
    _, manifest = put(store, PLACE, {})
    assert list(another.found()) == [(PLACE, manifest)]
    assert manifest.size == 0


def test_a_forgotten_copy_takes_no_room(store, another):
    other = CopyKey(kind=FAR, slot=4, epoch=2, number=1)
    _, manifest = put(store, PLACE)
    put(store, other, slot=4)
    assert store.used == 2 * manifest.size
    store.forget(PLACE)
    assert [place for place, _ in another.found()] == [other]
    assert store.used == manifest.size
    assert not any(path.name.startswith(str(PLACE)) for path in store.folder.iterdir())


def test_copies_of_older_epochs_are_forgotten_regardless_of_writer(store, another):
    places = [CopyKey(kind=kind, slot=3, epoch=epoch, number=1) for kind in (NEAR, FAR) for epoch in (1, 2, 3, 10)]
    for place, writer in zip(places, [store, another] * 4, strict=True):
        put(writer, place, epoch=place.epoch)
    store.open(CopyKey(kind=NEAR, slot=8, epoch=2, number=0), 100)
    store.forget_before(3)
    assert {place for place, _ in another.found()} == {place for place in places if place.epoch >= 3}
    assert len(list(store.folder.iterdir())) == 2 * 4, "bytes without a manifest are removed as well"


def test_forgetting_in_a_missing_folder_is_no_error(store):
    store.folder.rmdir()
    store.forget_before(3)


@pytest.mark.parametrize("at", [0, 1, 100, -40, -33, -32, -1])
def test_a_manifest_with_a_changed_byte_is_not_listed(store, another, at):
    _, manifest = put(store, PLACE)
    text = bytearray(manifest.encode())
    text[at] ^= 1
    store.complete_raw(PLACE, bytes(text))
    assert another.manifest(PLACE) is None
    assert list(another.found()) == []


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_a_truncated_manifest_is_not_listed(store, another, part):
    _, manifest = put(store, PLACE)
    text = manifest.encode()
    store.complete_raw(PLACE, text[: int(len(text) * part)])
    assert list(another.found()) == []


def test_a_truncated_or_missing_copy_is_not_listed(store, another):
    _, manifest = put(store, PLACE)
    path = store.folder / str(PLACE)
    os.truncate(path, manifest.size - 1)
    assert another.manifest(PLACE) is None
    path.unlink()
    assert another.manifest(PLACE) is None
    assert list(another.found()) == []


def test_other_files_are_no_copies(store, another):
    put(store, PLACE)
    text = (store.folder / f"{PLACE}.json").read_bytes()
    for name in ["near-3-e2.json", "near-3-e2-0", "near-3-e2-2", "there-3-e2-0.json", "notes.json", "x"]:
        (store.folder / name).write_bytes(text)
    store.forget(PLACE)
    assert list(another.found()) == []


@pytest.mark.parametrize("place", [PLACE, CopyKey(kind=FAR, slot=120, epoch=31, number=1)])
def test_a_place_is_read_from_its_name(place):
    assert CopyKey.read(str(place)) == place
    assert CopyKey.read(f"{place}.json") is None


def test_a_killed_process_leaves_complete_copies_or_none(store, tmp_path):
    """It is killed when one copy is complete, and while it overwrites another."""
    memory, manifest = written(some_values())
    complete, half = PLACE, CopyKey(kind=NEAR, slot=3, epoch=2, number=1)
    for name, content in {"manifest": manifest.encode(), "memory": memory.numpy().tobytes()}.items():
        (tmp_path / name).write_bytes(content)
    paths = [store.folder, tmp_path / "manifest", tmp_path / "memory"]
    done = subprocess.run([sys.executable, "-c", DIES, *map(str, [*paths, complete, half])], check=False)
    assert done.returncode == -signal.SIGKILL
    assert list(store.found()) == [(complete, manifest)]
    assert torch.equal(bytes_of(store, complete)[: manifest.size], memory)
    assert (store.folder / str(half)).stat().st_size == manifest.size, "its bytes are there"


def test_only_the_owner_may_read_a_copy(store):
    put(store, PLACE)
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((store.folder / str(PLACE)).stat().st_mode) == 0o600


def test_only_the_owner_may_read_a_manifest(store):
    umask = os.umask(0o022)
    try:
        put(store, PLACE)
    finally:
        os.umask(umask)
    assert stat.S_IMODE((store.folder / f"{PLACE}.json").stat().st_mode) == 0o600


def test_copies_take_no_more_than_they_may(tmp_path):
    store = Store(tmp_path, at_most=5_000_000)
    store.open(PLACE, 3_000_000)
    other = CopyKey(kind=FAR, slot=4, epoch=2, number=0)
    with pytest.raises(NoRoom, match=r"far-4-e2-0 would take 2\.5 MB.*have 3\.0 MB.*max_host_gb is 0\.005") as error:
        Store(tmp_path, at_most=5_000_000).open(other, 2_500_000)
    assert "raise it" in error.value.fix
    assert [path.name for path in tmp_path.iterdir()] == [str(PLACE)]
    store.open(PLACE, 4_000_000)
    store.open(other, 1_000_000)
    assert store.used == 5_000_000, "exactly as much is allowed, and what is replaced does not count"
    store.close()


def test_the_fix_for_a_full_memory_names_keys_that_there_are(tmp_path):
    with pytest.raises(NoRoom) as error:
        Store(tmp_path, at_most=10).open(PLACE, 11)
    (modes,) = (field.metadata for field in dataclasses.fields(CopyPolicy) if field.name == "mode")
    for key, value in re.findall(r"copies\.(\w+)(?: = ([\w:]+))?", str(error.value)):
        assert key in {field.name for field in dataclasses.fields(CopyPolicy)}
        assert not value or value in str(modes)


@pytest.fixture
def small_memory(tmp_path):
    """A filesystem with 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip(f"no filesystem can be mounted: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_memory_that_is_full_is_found_before_anything_is_written(small_memory):
    store = Store(small_memory)
    _, manifest = put(store, PLACE)
    other = CopyKey(kind=FAR, slot=4, epoch=2, number=0)
    with pytest.raises(NoRoom, match=r"far-4-e2-0 would take 0\.1 MB, and .* has 0\.0 MB left.*mount -o remount"):
        store.open(other, 60_000)
    assert {path.name for path in small_memory.iterdir()} == {str(PLACE), f"{PLACE}.json"}
    assert list(store.found()) == [(PLACE, manifest)]
    store.close()


def test_a_memory_that_has_no_room_for_the_manifest_is_full_too(small_memory):
    store = Store(small_memory)
    _, manifest = written({"a": torch.ones(16384)})
    try:
        with pytest.raises(NoRoom):
            store.open(PLACE, 65536)
            store.complete(PLACE, manifest)
    finally:
        store.close()


def test_two_runs_do_not_see_each_others_copies(tmp_path):
    one, other = Store(tmp_path / "one" / "host"), Store(tmp_path / "other" / "host")
    put(one, PLACE)
    assert list(other.found()) == []
    put(other, PLACE, some_values(1), run="other")
    assert [(place, found.run) for place, found in one.found()] == [(PLACE, "run")]
    other.forget_before(9)
    assert len(list(one.found())) == 1
    one.close()
    other.close()


def test_copies_are_forgotten_while_others_are_made(store):
    """A thread that takes copies from others opens a place just when the training looks through them."""

    class Epoch(int):
        def __gt__(self, other):
            newer = CopyKey(kind=FAR, slot=len(store._maps), epoch=5, number=0)
            if newer.slot < 4:
                store.open(newer, 10)
            return int(self) > other

    old = CopyKey(kind=NEAR, slot=1, epoch=2, number=0)
    for place in (old, PLACE):
        store.open(place, 10)
    store.forget_before(Epoch(3))
    assert not (store.folder / str(old)).exists()


def test_copies_of_later_steps_are_forgotten_regardless_of_writer(tmp_path):
    """Incomplete copies, whose step is not known, are forgotten as well."""
    mine, others = Store(tmp_path), Store(tmp_path)
    for number, step in enumerate((5, 6)):
        memory, manifest = written(some_values(), step=step)
        for store, kind in ((mine, NEAR), (others, FAR)):
            place = dataclasses.replace(PLACE, kind=kind, number=number)
            store.open(place, manifest.size).copy_(memory)
            store.complete(place, manifest)
    others.open(dataclasses.replace(PLACE, slot=4), 100)
    mine.forget_since(5)
    assert {(place.kind, place.number) for place, _ in others.found()} == {(NEAR, 0), (FAR, 0)}
    assert len(list(tmp_path.iterdir())) == 4


def test_copies_of_an_earlier_plugin_version_are_not_listed(store):
    """All in one line."""
    put(store, PLACE)
    path = store.folder / f"{PLACE}.json"
    body = b'["run", [5, 2], 3, [3, 9], 64, [], {}]'
    path.write_bytes(body + b"\n" + hashlib.blake2b(body, digest_size=16).hexdigest().encode())
    assert list(store.found()) == []
    assert list(store.broken()) == [(PLACE, None)]
