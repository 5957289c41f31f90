"""Copies of state on a GPU have the same bytes and digests as those of state in host memory."""

import pytest
import torch

from ntp_plugin.copies.digest import digests
from ntp_plugin.copies.manifest import Version, views
from ntp_plugin.copies.replicator import Part, Replicator, Snapshot
from ntp_plugin.copies.runs import runs_of
from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.copies.store import NEAR, CopyKey, Store

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPE = (300, 700)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize(("dim", "ranges"), [(0, ((10, 300),)), (1, ((0, 100), (300, 450)))])
def test_a_digest_is_the_same_number_on_a_gpu(dtype, dim, ranges):
    values = [torch.randn(SHAPE).mul(100).to(dtype) for _ in range(2)]
    parts = [torch.cat([one.narrow(dim, start, stop - start) for start, stop in ranges], dim) for one in values]
    runs = runs_of(SHAPE, dim, ranges)
    there = digests([part.cuda() for part in parts], runs, salts=["a", "b"])
    assert there == digests(parts, runs, salts=["a", "b"])


def test_a_copy_holds_the_state_at_its_beginning_in_pinned_memory(tmp_path):
    store, trouble = Store(tmp_path / "host"), []
    replicator = Replicator(store, run="r", secret="s", slot=0, trouble=trouble.append)
    values = {name: torch.randn(1 << 22, device="cuda") for name in ("main", "exp_avg")}
    before = {name: one.cpu() for name, one in values.items()}
    size = 1 << 22
    tensor_slice = TensorSlice(tensor="w", shape=(size,), dim=0, ranges=((0, size),), start=0, stop=size)
    parts = [Part(tensor_slice=tensor_slice, values=values, numbers={})]
    for step in range(4):
        replicator.begin(Snapshot(version=Version(step=step, epoch=0), holders=(0,), parts=parts, extras={}))
        replicator.wait_until_taken()
        for one in values.values():
            one.add_(1)
        replicator.wait()
        replicator.commit()
        place = CopyKey(kind=NEAR, slot=0, epoch=0, number=step % 2)
        manifest, memory = store.manifest(place), store.written(place)
        assert manifest.version.step == step
        assert memory.is_pinned()
        for name, copied in views(memory, manifest.held[0]).items():
            assert torch.equal(copied, before[name])
        before = {name: one.cpu() for name, one in values.items()}
    replicator.close()
    store.close()
    assert trouble == []
