"""The unit table against tensors cut the way Megatron cuts them."""

import argparse
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntp_plugin.config.sections import Model
from ntp_plugin.errors import ConfigError, Refused
from ntp_plugin.megatron.job_shape import with_routed
from ntp_plugin.planning.shard_layout import lay_out, place_elements, slot_elements
from ntp_plugin.planning.units import ModelUnits, default_granule, padded_vocabulary, transformer_units
from tests.unit.properties import each
from tests.unit.strategies import jobs


def model(**changed):
    shape = {"layers": 2, "hidden": 24, "heads": 12, "groups": 6, "ffn": 18, "vocab": 10, "vocab_multiple": 2}
    return Model(**shape | changed)


def local_indices(name, tp, slot, pattern=(), **changed):
    """The rows or columns of a tensor that a slot holds, in its local order."""
    stage = transformer_units(model(**changed), tp=tp, pp=1, granule=1).stages[0]
    tensor = next(tensor for tensor, _ in stage.tensors if tensor.name == name)
    family = next(family for family in stage.families if family.name == tensor.family)
    return each(tensor.local_index(lay_out(family, tp, pattern).holdings[slot]))


def test_qkv_is_cut_by_query_groups():
    """12 heads of 2 channels in 6 groups: a group's rows are 2 heads x 2 of q, then 2 of k, then 2 of v."""
    assert local_indices("linear_qkv.weight", 3, 1) == list(range(16, 32))
    assert local_indices("linear_proj.weight", 3, 1) == list(range(8, 16))


LATENT = {"groups": None, "kv_lora_rank": 5, "qk_head_dim": 4, "qk_pos_emb_head_dim": 2, "v_head_dim": 3}


def test_latent_attention_is_cut_by_heads():
    """A head's rows of the up-projections are (4 + 2) of q, and 4 of k with 3 of v; its columns of proj are 3."""
    assert local_indices("linear_q_up_proj.weight", 3, 1, q_lora_rank=7, **LATENT) == list(range(24, 48))
    assert local_indices("linear_q_proj.weight", 3, 1, **LATENT) == list(range(24, 48))
    assert local_indices("linear_kv_up_proj.weight", 3, 1, **LATENT) == list(range(28, 56))
    assert local_indices("linear_proj.weight", 3, 1, **LATENT) == list(range(12, 24))


def test_the_down_projections_of_latent_attention_are_replicated():
    (stage,) = transformer_units(model(q_lora_rank=7, **LATENT), tp=3, pp=1).stages
    shapes = {tensor.name: tensor.shape for tensor, _ in stage.tensors if not tensor.family}
    assert shapes["linear_q_down_proj.weight"] == (7, 24)
    assert shapes["linear_kv_down_proj.weight"] == (5 + 2, 24)


def test_latent_attention_has_no_query_groups():
    with pytest.raises(ConfigError, match="groups = 6 is not heads = 12"):
        model(**LATENT | {"groups": 6})
    with pytest.raises(ConfigError, match="kv_lora_rank is missing"):
        model(q_lora_rank=7)


def test_a_gated_fc1_keeps_gate_and_up_of_the_same_granules():
    assert local_indices("linear_fc1.weight", 3, 2) == [*range(12, 18), *range(30, 36)]
    assert local_indices("linear_fc2.weight", 3, 2) == list(range(12, 18))


def test_a_plain_fc1_has_one_run():
    assert local_indices("linear_fc1.weight", 3, 2, gated=False) == list(range(12, 18))


def test_dealt_granules_are_appended_to_each_half():
    assert local_indices("linear_fc1.weight", 3, 0, pattern=(2,)) == [*range(6), 12, 13, 14, *range(18, 24), 30, 31, 32]
    assert local_indices("linear_fc2.weight", 3, 0, pattern=(2,)) == [*range(6), 12, 13, 14]


def test_a_degraded_vocabulary_stays_contiguous():
    assert local_indices("word_embeddings.weight", 3, 2, pattern=(1,)) == list(range(6, 12))


def test_padding_follows_the_nominal_degree():
    assert padded_vocabulary(Model(layers=1, hidden=8, heads=1, ffn=8, vocab=128256), 8) == 129024


@given(jobs())
def test_every_parameter_is_counted_once(job):
    """Per slot of the nominal layout: cut tensors in equal parts and replicated ones in full, summed over the group."""
    tp = job.parallel.tp
    for stage in transformer_units(job.model, tp=tp, pp=job.parallel.pp, granule=1).stages:
        cut = sum(family.units * stage.elements_per_unit[family.name] for family in stage.families)
        assert cut + stage.replicated_elements == stage.elements
        for tensor, _ in stage.tensors:
            if tensor.family:
                family = next(family for family in stage.families if family.name == tensor.family)
                rows = [row for held in lay_out(family, tp).holdings for row in each(tensor.local_index(held))]
                assert sorted(rows) == list(range(tensor.shape[tensor.dim]))


def test_a_job_may_say_how_many_layers_a_stage_has():
    """The last has the output layer and no other."""
    first, last = transformer_units(model(layers=3), tp=2, pp=2, depths=(3, 0)).stages
    assert {count for tensor, count in first.tensors if tensor.family == "attention"} == {3}
    assert last.elements == 12 * 24 + 24, "12 padded rows, and the norm before them"


@given(st.booleans(), st.integers(1, 3))
def test_tied_embeddings_are_on_the_first_and_the_last_stage(tied, pp):
    stages = transformer_units(model(layers=6, tied=tied), tp=2, pp=pp).stages
    names = [{tensor.name for tensor, _ in stage.tensors if tensor.family == "vocabulary"} for stage in stages]
    embedding, output = "word_embeddings.weight", "output_layer.weight"
    assert names[0] >= {embedding}
    assert (output in names[-1]) is not tied
    assert all(not middle for middle in names[1:-1])


@pytest.mark.parametrize(
    ("ffn", "tp", "granule"), [(28672, 8, 64), (81920, 64, 64), (1024, 8, 16), (256, 4, 1), (18, 3, 1)]
)
def test_the_default_granule_is_wide_but_cuts_a_slot_into_eight_or_more(ffn, tp, granule):
    assert default_granule(ffn, tp) == granule


@pytest.mark.parametrize(
    ("changed", "tp", "granule", "message"),
    [
        ({}, 4, None, "groups = 6 query groups do not divide over tp = 4"),
        ({}, 12, None, "groups = 6 query groups do not divide over tp = 12"),
        ({"ffn": 20}, 3, None, "ffn = 20 does not divide over tp = 3"),
        ({}, 3, 4, "granule = 4 does not divide a slot's 6 MLP columns"),
    ],
)
def test_shapes_that_cannot_be_cut_are_refused(changed, tp, granule, message):
    with pytest.raises(Refused, match=message):
        transformer_units(model(**changed), tp=tp, pp=1, granule=granule)


EXPERTS = {"experts": 6, "moe_router_topk": 2, "moe_ffn": 12, "moe_layer_freq": "[0,1]"}


def test_a_layer_of_experts_has_a_router_and_each_expert_once():
    """One of two layers has 6 experts of 12 columns, gated, and a router of 6 rows; the other keeps its MLP of 18."""
    (stage,) = transformer_units(model(**EXPERTS), tp=2, pp=1, ep=3, etp=2).stages
    dense = transformer_units(model(), tp=2, pp=1).stages[0].elements
    assert stage.expert_elements == 6 * 3 * 24 * 12
    assert stage.elements == dense - 3 * 24 * 18 + 6 * 24 + 6 * 3 * 24 * 12
    assert stage.expert_flops == 2 * 2 * 3 * 24 * 12, "a token multiplies with two experts"
    assert [(family.units, family.each, family.number) for family in stage.experts] == [(6, 2, 0), (6, 2, 1)]


def test_shared_experts_are_cut_as_mlps_and_routed_ones_over_the_slots_of_their_group():
    shape = model(**EXPERTS | {"moe_layer_freq": "1"}, moe_shared_expert_ffn=16, moe_shared_expert_gate=True)
    (stage,) = transformer_units(shape, tp=2, pp=1, ep=3, etp=1).stages
    names = [family.name for family in stage.families]
    assert names == ["attention", "mlp of shared experts", "vocabulary"], "no layer has an MLP beside experts"
    assert sum(slot_elements(stage, 2, ())) == stage.elements - stage.expert_elements + stage.replicated_elements
    assert place_elements(stage, ()) == [stage.expert_elements // 3] * 3
    assert place_elements(stage, (1,)) == [stage.expert_elements // 2] * 2
    gate = next(tensor for tensor, _ in stage.tensors if tensor.name == "shared_experts.gate_weight")
    assert (gate.elements, gate.family) == (24, "")


@pytest.mark.parametrize("freq", ["1", "[0,1,1,0]"])
def test_a_stage_has_the_experts_of_its_own_layers(freq):
    stages = transformer_units(model(layers=4, **EXPERTS | {"moe_layer_freq": freq}), tp=1, pp=2, ep=6).stages
    of_layer = 6 * 3 * 24 * 12
    assert [stage.expert_elements // of_layer for stage in stages] == ([2, 2] if freq == "1" else [1, 1])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"moe_ffn": 12}, "moe_ffn = 12 is of experts, and experts is missing"),
        ({"moe_layer_freq": "2"}, "moe_layer_freq = 2 is of experts, and experts is missing"),
        ({"experts": 4, "moe_router_topk": 5}, "moe_router_topk = 5 is above experts = 4"),
        ({"experts": 4, "moe_layer_freq": "[0,0]"}, "leaves no layer with experts"),
    ],
)
def test_experts_that_do_not_fit_together_are_refused(changed, message):
    with pytest.raises(ConfigError) as refused:
        model(**changed)
    assert message in str(refused.value)


def test_shared_experts_that_do_not_divide_are_refused():
    with pytest.raises(Refused, match="moe_shared_expert_ffn = 15 does not divide over tp = 2"):
        transformer_units(model(experts=2, moe_shared_expert_ffn=15), tp=2, pp=1)


def test_the_layers_of_a_live_job_with_their_router_are_those_of_its_shape():
    """Layers that were built know nothing of a router; with it they have the pace that a plan gives them."""
    described = transformer_units(model(layers=4, **EXPERTS | {"moe_layer_freq": "1"}), tp=1, pp=2, ep=3)
    built = ModelUnits(stages=tuple(dataclasses.replace(stage, expert_flops=0) for stage in described.stages))
    assert with_routed(built, argparse.Namespace(num_experts=6, moe_router_topk=2)) == described
    assert with_routed(built, argparse.Namespace(num_experts=None)) == built
