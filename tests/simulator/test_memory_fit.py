"""The memory guard: activations by the published formula, the ladder, and no rung that fits worse on some rank."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntp_plugin.config.sections import Batch, Model, State
from ntp_plugin.errors import Refused
from ntp_plugin.planning import memory_fit
from ntp_plugin.planning.memory_fit import (
    AS_IS,
    NARROWER,
    OFFLOAD,
    RECOMPUTE,
    SMALLER,
    Training,
    activation_bytes,
    fit,
    fit_groups,
    memory_use,
    narrowest,
)
from ntp_plugin.planning.topology import Slot, SurvivingReplicas, Topology
from ntp_plugin.planning.units import transformer_units

MODEL = Model(layers=24, hidden=2048, heads=16, ffn=8192, vocab=32000, seq=2048, gated=False)
TOPOLOGY = Topology(tp=4, pp=2, dp=3, gpus_per_node=8, nodes_per_rack=4, racks_per_power_row=8)
TRAINING = Training(
    model=MODEL,
    units=transformer_units(MODEL, tp=4, pp=2),
    state=State(),
    batch=Batch(micro_batch=4),
    micro_batches=16,
)


def tried(limit, pattern=(1,), training=TRAINING, **options):
    return fit(training, 0, 4, pattern, limit=limit, replicas=3, packing=True, **options)


def test_activations_are_those_of_the_published_formula():
    """34 s b h / t for each layer (arXiv 2205.05198, eq. 4, without the scores), times the micro-batches in flight."""
    layer = 34 * 2048 * 4 * 2048 // 4
    assert activation_bytes(TRAINING, 0, 4, ()) == 12 * layer * 2
    assert activation_bytes(TRAINING, 1, 4, ()) == 12 * layer
    assert activation_bytes(TRAINING, 0, 4, (), splits=4) == 12 * layer * 2 // 4
    full = activation_bytes(TRAINING, 0, 4, (), recompute=True)
    assert full == 12 * 2 * (2048 * 4 * 2048 // 4) * 2 + layer


def test_a_stage_without_layers_keeps_nothing():
    units = transformer_units(MODEL, tp=4, pp=2, depths=(24, 0))
    training = dataclasses.replace(TRAINING, units=units)
    assert activation_bytes(training, 0, 4, ()) == 2 * activation_bytes(TRAINING, 0, 4, ())
    assert activation_bytes(training, 1, 4, ()) == 0
    assert activation_bytes(training, 1, 4, (), recompute=True) == 0


def test_latent_attention_keeps_its_heads_and_in_every_slot_the_latents():
    latent = {
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
    }
    model = dataclasses.replace(MODEL, **latent)
    training = dataclasses.replace(TRAINING, model=model, units=transformer_units(model, tp=4, pp=2))
    rows, hidden, slots = 2048 * 4, 2048, 4
    replaced = 2 * rows * 16 // slots * 4 * 128  # of plain attention: queries, keys, values and the output of each head
    heads = 2 * rows * 16 // slots * (2 * (128 + 64) + 2 * 128)
    latents = 2 * rows // slots * (2 * (1536 + 512) + 64)
    layer = 34 * rows * hidden // slots - replaced + heads + latents
    assert activation_bytes(training, 1, 4, ()) == 12 * layer


def test_the_degraded_group_holds_more():
    for count in range(3):
        wider, narrower = (activation_bytes(TRAINING, 0, 4, tuple(range(n))) for n in (count, count + 1))
        assert narrower > wider
    # Of 16 heads three slots hold six at most, where a quarter was four: attention's part is half as large again.
    degraded = activation_bytes(TRAINING, 0, 4, (0,))
    assert 1.33 < degraded / activation_bytes(TRAINING, 0, 4, ()) < 1.5


def test_the_ladder_stops_at_the_first_rung_that_fits():
    rungs = tried(0)
    names = list(dict.fromkeys(rung.name for rung in rungs))
    assert names == [AS_IS, SMALLER, RECOMPUTE, OFFLOAD, NARROWER]
    for rung in rungs:
        until = tried(rung.bytes)
        assert until[-1].bytes <= rung.bytes
        assert len(until) <= rungs.index(rung) + 1
    assert tried(rungs[0].bytes)[-1].name == AS_IS
    assert tried(rungs[0].bytes - 1)[-1] == rungs[1]
    assert (rungs[1].splits, rungs[2].splits) == (2, 4)


def test_each_rung_keeps_the_savings_of_the_ones_before():
    before_narrower = [rung.bytes for rung in tried(0) if rung.name != NARROWER]
    assert before_narrower == sorted(before_narrower, reverse=True)
    offloaded = next(rung for rung in tried(0) if rung.name == OFFLOAD)
    assert offloaded.recompute and offloaded.splits == 4


def test_fewer_slots_never_hold_less_by_our_units():
    """Why that rung is the last: it is for bytes that are not ours."""
    last = [rung.bytes for rung in tried(0) if rung.name in (OFFLOAD, NARROWER)]
    assert last == sorted(last)
    assert [rung.name for rung in tried(0, min_tp_width=3)].count(NARROWER) == 0


def test_every_affected_group_is_checked_before_any_change():
    surviving = SurvivingReplicas(topology=TOPOLOGY, lost=frozenset({Slot(replica=1, stage=1, tp=2)}), min_tp_width=1)
    roomy = fit_groups(TRAINING, surviving, limit=80e9)
    assert set(roomy) == {(0, ()), (1, ()), (1, (2,))}
    assert {rung.name for rung in roomy.values()} == {AS_IS}
    degraded = roomy[1, (2,)].bytes
    tight = fit_groups(TRAINING, surviving, limit=degraded - 1)
    assert tight[1, (2,)].name == SMALLER
    with pytest.raises(Refused, match=r"stage 0 at TP width 4 does not fit into 1 GB per GPU: as is .* GB"):
        fit_groups(TRAINING, surviving, limit=1e9)


def test_a_dropped_replica_leaves_fewer_to_share_the_optimizer():
    sharded = dataclasses.replace(TRAINING, state=State(distributed_optimizer=True))
    nobody = SurvivingReplicas(topology=TOPOLOGY, lost=frozenset(), min_tp_width=4)
    one = SurvivingReplicas(topology=TOPOLOGY, lost=frozenset({Slot(replica=1, stage=1, tp=2)}), min_tp_width=4)
    before, after = (fit_groups(sharded, surviving, limit=80e9)[0, ()].bytes for surviving in (nobody, one))
    use = memory_use(sharded.units.stages[0], 4, (), sharded.state, replicas=3, packing=False)
    assert after - before == pytest.approx(use.optimizer / 2, rel=1e-6)


@given(st.sampled_from([2, 4]), st.sets(st.integers(0, 3), min_size=1, max_size=3), st.integers(0, 1))
def test_memory_depends_on_the_width_and_not_on_which_slots_are_lost(micro_batch, lost, stage):
    """So a width can be judged before anybody knows who will be lost."""
    training = dataclasses.replace(TRAINING, batch=Batch(micro_batch=micro_batch))
    some, last = tuple(sorted(lost)), tuple(range(4 - len(lost), 4))
    sizes = [fit(training, stage, 4, pattern, limit=0, replicas=3, packing=True)[0].bytes for pattern in (some, last)]
    assert sizes[0] == pytest.approx(sizes[1], rel=1e-3)


def test_the_narrowest_replica_that_fits():
    sizes = {width: tried(0, tuple(range(width, 4)))[0].bytes for width in (1, 2, 3)}
    options = {"limit": sizes[2], "rungs": (AS_IS,)}
    assert narrowest(TRAINING, TOPOLOGY, min_tp_width=1, **options) == 2
    assert narrowest(TRAINING, TOPOLOGY, min_tp_width=3, **options) == 3
    assert narrowest(TRAINING, TOPOLOGY, min_tp_width=1, limit=0, rungs=(AS_IS,)) == 4
    assert narrowest(TRAINING, TOPOLOGY, min_tp_width=1, limit=sizes[1], rungs=(AS_IS,)) == 1


def test_activations_without_sequence_parallelism_and_in_float32():
    """34 s b h / t becomes (10 + 24 / t) s b h (arXiv 2205.05198, eq. 2), and in float32 all but the masks doubles."""
    rows = 2048 * 4 * 2048
    plain = dataclasses.replace(TRAINING, sequence_parallel=False)
    assert activation_bytes(plain, 1, 4, ()) == 12 * (10 * rows + 24 * rows // 4)
    double = dataclasses.replace(plain, activation=4)
    assert activation_bytes(double, 1, 4, ()) == 12 * ((2 * 8 + 2) * rows + 48 * rows // 4)


def test_a_guard_that_checks_only_full_groups_is_detected(monkeypatch):
    """A negative control: the test above fails where degraded patterns are left out."""
    monkeypatch.setattr(SurvivingReplicas, "patterns_of_segment", lambda *_: {})
    with pytest.raises(AssertionError):
        test_every_affected_group_is_checked_before_any_change()
    assert memory_fit.fit_groups is fit_groups
