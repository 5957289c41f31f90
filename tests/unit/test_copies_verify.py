"""Changed bytes are named, by machine code as by NumPy, at once or while they arrive."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ntp_plugin.copies import verify
from ntp_plugin.copies.layout import DTYPES, in_a_row, laid_out
from ntp_plugin.copies.machine import machine
from ntp_plugin.copies.manifest import Manifest, Version
from ntp_plugin.copies.replicator import Part, Replicator, Snapshot
from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.copies.store import NEAR, CopyKey, Store
from ntp_plugin.copies.verify import Checked, wrong_in
from tests.unit.copies_bytes import bytes_of

pytestmark = pytest.mark.skipif(machine() is None, reason="it was not built")

COLUMNS = 700
"""Columns of a tensor, two parts of which are held, so that there are pages, and runs in each."""
kinds = st.lists(st.sampled_from(sorted(DTYPES)), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """Copies of pieces of these types, as a replicator makes them."""
    found = {}

    def make(dtypes):
        if dtypes not in found:
            folder = tmp_path_factory.mktemp("copy")
            found[dtypes] = _copied(Store(folder), dtypes)
        return found[dtypes]

    return make


def _copied(store, dtypes):
    generator = torch.Generator().manual_seed(len(dtypes))
    parts = [
        Part(
            tensor_slice=TensorSlice(
                tensor=f"{number}",
                shape=(30, COLUMNS),
                dim=1,
                ranges=((600, 700), (0, 50)),
                start=0,
                stop=30 * 150 - 10 * number,
            ),
            values={
                name: (100 * torch.randn(30 * 150 - 10 * number, generator=generator)).to(DTYPES[name])
                for name in names
            },
            numbers={"step": number},
        )
        for number, names in enumerate(dtypes)
    ]
    trouble = []
    replicator = Replicator(store, run="r", secret="s", slot=0, trouble=trouble.append)
    replicator.begin(Snapshot(version=Version(step=3, epoch=1), holders=(0,), parts=parts, extras={"x": b"1"}))
    replicator.wait()
    replicator.close()
    assert not trouble
    place = CopyKey(kind=NEAR, slot=0, epoch=1, number=0)
    return store.manifest(place), bytes_of(store, place)


def as_numpy_says(memory, manifest, **which):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "machine", lambda: None)
        return wrong_in(memory, manifest, **which)


@settings(max_examples=60, deadline=None)
@given(st.lists(kinds.map(lambda names: tuple(dict.fromkeys(names))), min_size=1, max_size=4).map(tuple), st.data())
def test_machine_code_names_the_same_places_as_numpy(copied, dtypes, data):
    manifest, memory = copied(dtypes)
    memory = memory.clone()
    for at in data.draw(st.lists(st.integers(0, len(memory) - 1), max_size=3)):
        memory[at] ^= 1 << data.draw(st.integers(0, 7))
    assert wrong_in(memory, manifest) == as_numpy_says(memory, manifest)
    first, until = sorted(data.draw(st.tuples(st.integers(0, len(dtypes)), st.integers(0, len(dtypes)))))
    since = manifest.held[first].entries[0].offset if first < until else 0
    which = {"first": first, "until": until, "since": since}
    assert wrong_in(memory[since:], manifest, **which) == as_numpy_says(memory[since:], manifest, **which)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_streamed_verification_reads_bytes_only_after_arrival(copied, data):
    manifest, memory = copied((("float32", "bfloat16"), ("float64",)))
    memory = memory.clone()
    flipped = data.draw(st.none() | st.integers(0, len(memory) - 1))
    if flipped is not None:
        memory[flipped] ^= 4
    came = torch.zeros_like(memory)
    checked = Checked.begun(came, manifest)
    at = 0
    for there in sorted(data.draw(st.lists(st.integers(0, len(memory)), max_size=5))):
        came[at:there] = memory[at:there]
        at = there
        checked.come(there)
    came[at:] = memory[at:]
    assert checked.wrong() == as_numpy_says(memory, manifest)


def test_offsets_beyond_the_bytes_are_not_read(copied):
    manifest, memory = copied((("float32",), ("float32",)))
    with pytest.raises(ValueError, match="has values beyond its bytes"):
        wrong_in(memory[:-64], manifest)
    with pytest.raises(ValueError, match="has values beyond its bytes"):
        wrong_in(memory[64:], manifest, since=64)
    assert wrong_in(memory[64:], manifest, first=2, since=64) == []


def test_misaligned_values_are_left_to_torch(copied):
    manifest, _ = copied((("float32",), ("float32",)))
    (tensor_slice, ((name, dtype, _),)), other = manifest.layout.tensor_slices
    odd = dataclasses.replace(manifest, layout=laid_out(((tensor_slice, ((name, dtype, 2),)), other)))
    assert not odd.layout.is_aligned
    assert Checked.begun(torch.zeros(manifest.size, dtype=torch.uint8), odd) is None


def test_a_layout_is_checked_once_for_all_versions(copied):
    earlier, _ = copied((("float32",), ("float32",)))
    manifest = Manifest.decode(earlier.encode())  # that of the copy may be forgotten by now, for others' sake
    again = Manifest.decode(manifest.encode())
    next_one = dataclasses.replace(again, version=Version(step=4, epoch=1))
    assert manifest == again
    assert manifest.layout is again.layout is next_one.layout
    assert Manifest.decode(next_one.encode()).layout is manifest.layout
    assert next_one.encode().split(b"\n")[0] == manifest.encode().split(b"\n")[0]


def test_consecutive_slices_begin_at_cache_lines():
    tensor_slice = TensorSlice(tensor="t", shape=(5,), dim=0, ranges=((0, 5),), start=0, stop=5)
    layout = in_a_row(
        ((tensor_slice, (("a", torch.float32), ("b", torch.uint8))), (tensor_slice, (("a", torch.float64),)))
    )
    assert layout.offsets.tolist() == [0, 64, 128]
    assert layout.sizes.tolist() == [20, 5, 40]
    assert (layout.end, layout.begins) == (168, [0, 2, 3])
