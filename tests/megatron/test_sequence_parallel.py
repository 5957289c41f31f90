"""Sequence parallelism on replicas of any width trains as one uniform run, with no row lost or doubled.

The sequence has 16 rows, which 3 slots cannot share evenly; 4, 2 and 1 can. The reference of the options is Megatron
without sequence parallelism; that of the models has it.
"""

import pytest
import torch

from benchmarks.numerics import BOUNDS, compared
from ntp_plugin.errors import Refused
from ntp_plugin.megatron.layers.uneven_sequence import UnevenSequence
from ntp_plugin.planning.sequence_rows import SequenceRows
from ntp_plugin.testing.ranks import Ranks
from tests.harness.parity.job import largest_differences, run
from tests.harness.parity.layouts import BASE, LAYOUTS, OLD, OPTIONS, SEQUENCE, degraded, uniform

WIDTH, LENGTHS = 3, range(1, 11)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float64(layout):
    assert max(compared(SEQUENCE, layout).values()) <= BOUNDS["float64"]


def test_float32():
    assert max(compared(SEQUENCE, "TP4+TP3", dtype="float32").values()) <= BOUNDS["float32"]


@pytest.mark.parametrize(
    ("feature", "layout"),
    [
        (f"{SEQUENCE}: {OLD}", "TP4+TP3"),
        (f"{SEQUENCE}: tied embeddings", "TP4+TP3"),
        (f"{SEQUENCE}: qk-layernorm", "TP3+TP3"),
        (f"{SEQUENCE}: per-token loss", "TP4+TP4+TP3"),
        (f"{SEQUENCE}, distributed optimizer, overlap", "TP3+TP3"),
        (f"{SEQUENCE}, recompute", "TP4+TP3"),
        (f"{SEQUENCE}, recompute modules", "TP4+TP3"),
    ],
)
def test_sequence_parallelism_with_other_features(feature, layout):
    assert max(compared(feature, layout).values()) <= BOUNDS["float64"]


def test_bucket_sums_overlap_the_backward_pass():
    outcomes = run(degraded(BASE, "TP3+TP3", more=OPTIONS[f"{SEQUENCE}, distributed optimizer, overlap"]))
    assert all(seen.overlapped > 3 for seen in outcomes.values())


def test_megatron_itself_trains_the_same_with_it():
    worst = largest_differences(run(uniform(BASE, more=OPTIONS[SEQUENCE])), run(uniform(BASE)))
    assert max(worst.values()) <= BOUNDS["float64"]


# ---------------------------------------------------------------- the functions by themselves


def cut_and_whole(rank):
    """For sequences of many lengths: the difference between slots and the full computation; rows stored."""
    from ntp_plugin.megatron import cpu_emulation  # noqa: PLC0415  (only ranks know Megatron)

    cpu_emulation.install(cpu_emulation.FLOAT64)
    from megatron.core import parallel_state  # noqa: PLC0415
    from megatron.core.tensor_parallel import layers, mappings  # noqa: PLC0415

    store = torch.distributed.TCPStore("127.0.0.1", rank.port, is_master=False)
    torch.distributed.init_process_group("gloo", store=store, rank=rank.slot, world_size=WIDTH)
    parallel_state._set_global_memory_buffer()
    sequence = UnevenSequence(SequenceRows(length=1, width=WIDTH))
    for module, name, make in (
        (mappings, "_split_along_first_dim", sequence.split),
        (mappings, "_gather_along_first_dim", sequence.gather),
        (mappings, "_reduce_scatter_along_first_dim", sequence.reduce_scatter),
        (layers, "linear_with_grad_accumulation_and_async_allreduce", sequence.column_linear),
    ):  # as `hooks.py` has them, with another length each time
        setattr(module, name, make(getattr(module, name)))
    found = {}
    for length in LENGTHS:
        sequence._rows = SequenceRows(length=length, width=WIDTH)
        found[length] = one_length(length, rank.slot)
    sequence._with_pads = lambda whole: torch.cat([whole, torch.ones_like(whole[: sequence._rows.pads])])
    spoilt, _ = one_length(length, rank.slot)
    return found, spoilt


def one_length(length, place):
    """Models of a norm and a bias, a column-parallel layer, a row-parallel one, and a loss of either kind."""
    from megatron.core.tensor_parallel import layers, mappings  # noqa: PLC0415

    torch.manual_seed(length)
    values = torch.randn(length, 2, 4), torch.randn(4), torch.randn(4), torch.randn(6, 4), torch.randn(4, 6)
    replica_digests, mine = ([value.clone().requires_grad_() for value in values] for _ in range(2))
    tokens, scale, shift, column, row = replica_digests
    wanted = torch.tanh((tokens + shift) * scale @ column.t()) @ row.t() + shift
    (2 * wanted.square().sum()).backward()

    tokens, scale, shift, column, row = mine
    part, group = slice(2 * place, 2 * place + 2), torch.distributed.group.WORLD
    held = mappings.scatter_to_sequence_parallel_region(tokens, group=group)
    inner = layers.linear_with_grad_accumulation_and_async_allreduce(
        (held + shift) * scale,
        column[part],
        bias=None,
        gradient_accumulation_fusion=False,
        allreduce_dgrad=False,
        sequence_parallel=True,
        tp_group=group,
    )
    added = mappings.reduce_scatter_to_sequence_parallel_region(torch.tanh(inner) @ row[:, part].t(), group=group)
    added = added + shift
    alike = mappings.gather_from_sequence_parallel_region(added, tensor_parallel_output_grad=False, group=group)
    shared = mappings.gather_from_sequence_parallel_region(added, group=group)
    (alike.square().sum() + shared.square().sum() / WIDTH).backward()
    for known_in_parts in (scale, shift):  # each slot knows what its own rows say
        torch.distributed.all_reduce(known_in_parts.grad)

    pairs = [(alike, wanted), (shared, wanted)]
    pairs += [(one.grad, other.grad) for one, other in zip(mine[:3], replica_digests[:3], strict=True)]
    pairs += [(column.grad[part], replica_digests[3].grad[part]), (row.grad[:, part], replica_digests[4].grad[:, part])]
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs), held.shape[0]


@pytest.mark.short
@pytest.mark.parametrize("where", ["split", "gather", "reduce_scatter"])
def test_a_batch_of_another_length_is_refused(where):
    """Rather than cut wrongly; Megatron's own function is not called."""
    cut = getattr(UnevenSequence(SequenceRows(length=16, width=3)), where)(pytest.fail)
    with pytest.raises(Refused, match=r"a tensor of 12 rows where those of --seq-length make \d+.*Fix: ."):
        cut(torch.zeros(12, 1, 4), None)


@pytest.mark.short
def test_any_length_over_three_slots():
    with Ranks(WIDTH, cut_and_whole) as ranks:
        outcomes = ranks.wait()
    for found, with_gradients_on_pads in outcomes.values():
        for length, (difference, stored) in found.items():
            assert difference < 1e-12, length
            assert stored == SequenceRows(length=length, width=WIDTH).stored
        assert with_gradients_on_pads > 1e-3, "a planted bug is noticed"
