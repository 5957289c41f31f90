"""Ranks lost from the start, the slot of each rank, and the refusals."""

import argparse
import dataclasses
import types

import pytest

from ntp_plugin.config import schema
from ntp_plugin.config.sections import BatchPolicy, TrainingPolicy
from ntp_plugin.errors import ConfigError, Refused
from ntp_plugin.megatron.activation import read_policy
from ntp_plugin.megatron.layout import plan_start
from ntp_plugin.megatron.option_checks import (
    draws_exact_masks,
    refuse_live,
    refuse_what_does_not_work,
    unsupported_live,
)
from ntp_plugin.megatron.unsupported import EXACT_MASKS, LIVE, TABLE
from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.topology import Slot
from ntp_plugin.planning.units import Family


def layout(*lost, processes=7, rank=0, tp=4, pp=1):
    return plan_start(lost, tp=tp, pp=pp, processes=processes, rank=rank)


def test_ranks_are_the_slots_that_are_there_in_megatrons_order():
    found = layout("r1.s0.t0", rank=4)
    assert (found.topology.dp, found.slot, found.width, found.survivors) == (
        2,
        Slot(replica=1, stage=0, tp=1),
        3,
        [1, 2, 3],
    )
    assert [found.ranks[slot] for slot in found.slots] == list(range(7))
    assert [layout("r1.s0.t0", rank=rank).is_replica_leader for rank in range(7)] == [
        True,
        *[False] * 3,
        True,
        *[False] * 2,
    ]


def test_a_single_training_replica_is_detected():
    assert not layout("r1.s0.t0").is_held_once
    idle = frozenset(Slot(replica=1, stage=0, tp=tp) for tp in (1, 2, 3))
    assert dataclasses.replace(layout("r1.s0.t0"), idle=idle).is_held_once
    assert layout(processes=4).is_held_once


def test_lost_ranks_are_removed_from_lists_of_nominal_ranks():
    found = layout("r1.s0.t3,r0.s0.t1", processes=6)
    assert found.without_lost([[0, 1, 2, 3], [4, 5, 6, 7]]) == [[0, 1, 2], [3, 4, 5]]
    assert found.without_lost([[1, 5], [3, 7], [1]]) == [[4], [2]]


def test_every_unit_is_held_once_in_each_replica():
    family = Family(name="attention", units=8)
    for lost in ("r0.s0.t2", "r0.s0.t0,r0.s0.t3"):
        held = layout(lost, processes=8 - len(lost.split(","))).held_by(family)
        assert sp.union(*held) == ((0, 8),)


@pytest.mark.parametrize(
    ("lost", "processes", "message"),
    [
        (("r1.s0.t3",), 8, "8 processes are not full-width replicas of TP 4 x PP 1 but for r1.s0.t3"),
        (("r9.s0.t0",), 7, "r9.s0.t0 is not in this layout"),
        (("r1.s0.t7",), 7, "r1.s0.t7 is not in this layout"),
        (("third",), 7, "does not name a slot"),
    ],
)
def test_a_loss_that_does_not_fit_is_refused(lost, processes, message):
    with pytest.raises(ConfigError, match=message):
        layout(*lost, processes=processes)


def test_a_replica_without_slots_must_be_omitted():
    with pytest.raises(Refused, match=r"replica 1 has no slot left.*start fewer processes"):
        layout("r1", processes=4)
    with pytest.raises(Refused, match=r"replica 1 has no slot left.*start fewer processes"):
        layout("r1.s1,r1.s0", processes=8, pp=2)
    assert layout("r1.s1", processes=12, pp=2).lost


# ---------------------------------------------------------------- refusals


def arguments(**changes):
    """Megatron's arguments, as far as the table checks them, for a supported job."""
    fine = {
        "transformer_impl": "local",
        "tensor_model_parallel_size": 4,
        "use_cpu_initialization": True,
        "dataloader_type": None,
        "optimizer": "adam",
        "tensor_parallel_num_weight_shards": None,
        "group_query_attention": True,
        "num_query_groups": 8,
        "num_attention_heads": 16,
        "ffn_hidden_size": 2048,
        "kv_channels": 64,
        "fp8_recipe": "delayed",
        "fp8_wgrad": True,
    }
    return types.SimpleNamespace(**{**fine, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hybrid_layer_pattern": "*--*"},
        {"pipeline_model_parallel_layout": "Et*3,|(tt|)*6mL", "pipeline_model_parallel_size": 2, "mtp_num_layers": 1},
        {"optimizer": "sgd"},
        {"softmax_type": "off-by-one"},
        {"log_params_norm": True, "overlap_param_gather": True, "log_num_zeros_in_grad": True},
        {"overlap_param_gather": True},
        {"fp8": "hybrid"},
        {"fp8": "e4m3", "fp8_recipe": "tensorwise"},
        {"save": "/checkpoints", "load": "/checkpoints", "ckpt_format": "torch_dist", "async_save": True},
        {"save": "/checkpoints", "ckpt_assume_constant_structure": True},
        {"save": "/checkpoints", "non_persistent_save_interval": 10, "non_persistent_ckpt_type": "global"},
        {"load": "/checkpoints", "use_checkpoint_args": True},
        {"ckpt_format": "torch", "use_distributed_optimizer": True},
        {"step_batch_size_schedule": "0:8 1M:16"},
        {"rampup_batch_size": [2, 2, 100]},  # which Megatron ignores
        {"iterations_to_skip": [], "perform_initialization": True, "cross_entropy_fusion_impl": "native"},
    ],
)
def test_supported_settings_pass(changes):
    refuse_what_does_not_work(arguments(**changes), TrainingPolicy(), layout("r1.s0.t3"))


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"context_parallel_size": 2}, "--context-parallel-size with --ntp-gpu-memory-gb"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers with --ntp-gpu-memory-gb"),
        (
            {"experimental_attention_variant": "gated_delta_net"},
            "--experimental-attention-variant with --ntp-gpu-memory-gb",
        ),
    ],
)
def test_what_is_refused_where_memory_is_limited(changes, flag):
    """By a flag or a file: the policy has both."""
    with pytest.raises(Refused, match=flag):
        refuse_what_does_not_work(arguments(**changes), TrainingPolicy(gpu_memory_gb=80.0), layout("r1.s0.t3"))


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"context_parallel_size": 2}, "--context-parallel-size"),
        ({"mtp_num_layers": 1, "context_parallel_size": 2}, "--mtp-num-layers with --context-parallel-size"),
        ({"mtp_num_layers": 1, "fp8": "hybrid"}, "--mtp-num-layers with --fp8-format"),
        ({"mtp_num_layers": 1, "hybrid_layer_pattern": "*-"}, "--mtp-num-layers with --hybrid-layer-pattern"),
        ({"mtp_detach_heads": True}, "--mtp-detach-heads"),
        ({"use_tp_pp_dp_mapping": True}, "--use-tp-pp-dp-mapping"),
        ({"experimental_attention_variant": "gated_delta_net"}, "--experimental-attention-variant "),
        ({"experimental_attention_variant": "dsa"}, "--experimental-attention-variant "),
        (
            {"experimental_attention_variant": "gated_delta_net", "sequence_parallel": False},
            "--experimental-attention-variant without --sequence-parallel",
        ),
        ({"expert_model_parallel_size": 2}, "--expert-model-parallel-size"),
        ({"optimizer": "muon", "tensor_model_parallel_size": 2}, "--optimizer muon"),
        (
            {
                "optimizer": "muon",
                "tensor_model_parallel_size": 2,
                "num_experts": 4,
                "muon_tp_mode": "distributed",
            },
            "--muon-tp-mode",
        ),
        ({"optimizer": "dist_muon"}, "--optimizer"),
        (
            {"optimizer": "muon", "num_experts": 4, "use_distributed_optimizer": True},
            "--optimizer muon with --use-distributed-optimizer",
        ),
        ({"optimizer": "lion"}, "--optimizer"),
        ({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, "--fp8-recipe"),
        ({"fp8": "hybrid", "fp8_param_gather": True}, "--fp8-param-gather"),
        ({"fp8": "hybrid", "fp8_wgrad": False}, "--no-fp8-wgrad"),
        ({"fp8": "hybrid", "pipeline_model_parallel_size": 2}, "--fp8-format with --pipeline-model-parallel-size"),
        ({"fp8": "hybrid", "recompute_granularity": "full"}, "--fp8-format with --recompute-granularity"),
        ({"fp8": "hybrid", "multi_latent_attention": True}, "--fp8-format with --multi-latent-attention"),
        ({"fp8": "hybrid", "ffn_hidden_size": 160}, "a granule is 1 of the 160 columns"),
        ({"fp8": "hybrid", "kv_channels": 8}, "--kv-channels 8 needs heads in multiples of 16"),
        ({"attention_dropout": 0.1}, "--attention-dropout"),
        ({"transformer_impl": "inference_optimized"}, "--transformer-impl inference_optimized"),
        ({"use_cpu_initialization": None}, "--use-cpu-initialization"),
        ({"dataloader_type": "cyclic"}, "--dataloader-type"),
        ({"save": "/checkpoints", "ckpt_format": "torch_dcp"}, "--ckpt-format"),
        ({"non_persistent_ckpt_type": "local"}, "--non-persistent-ckpt-type local"),
        ({"ckpt_convert_format": "torch"}, "--ckpt-convert-format"),
        ({"load_main_params_from_ckpt": True}, "--load-main-params-from-ckpt"),
        ({"hybrid_layer_pattern": "M-*-"}, r"--hybrid-layer-pattern with M \(Mamba\)"),
        ({"hybrid_override_pattern": "*E"}, r"--hybrid-layer-pattern with E \(experts\)"),
        ({"hybrid_layer_pattern": "*-/*"}, "--hybrid-layer-pattern with / "),
        ({"enable_cuda_graph": True}, "--enable-cuda-graph"),
        ({"freeze_all_layers": True}, "--freeze-all-layers"),
        ({"save_wgrads_interval": 5}, "--save-wgrads-interval"),
        ({"logits_load_dir": "/teacher"}, "--logits-load-dir"),
        ({"iterations_to_skip": [3]}, "--iterations-to-skip"),
        ({"softmax_type": "learnable"}, "--softmax-type"),
        ({"distribute_saved_activations": True}, "--distribute-saved-activations"),
        ({"cross_entropy_fusion_impl": "te"}, "--cross-entropy-fusion-impl"),
        ({"ddp_param_name_patterns_for_fp32_local_accumulation": ["norm"]}, "--ddp-param-name-patterns"),
        ({"ddp_reduce_scatter_with_fp32_accumulation": True}, "--ddp-reduce-scatter-with-fp32"),
        ({"lazy_mpu_init": True}, "--lazy-mpu-init"),
        ({"perform_initialization": False}, "--no-initialization"),
        (
            {"pipeline_model_parallel_layout": "Ett||(t|)*2L", "pipeline_model_parallel_size": 5},
            "--pipeline-model-parallel-layout with an empty stage",
        ),
        (
            {"pipeline_model_parallel_layout": "Et*3|m|L", "pipeline_model_parallel_size": 3, "mtp_num_layers": 1},
            "--pipeline-model-parallel-layout with m before the last stage",
        ),
        ({"use_ring_exchange_p2p": True}, "--use-ring-exchange-p2p"),
        ({"use_transformer_engine_op_fuser": True}, "--use-transformer-engine-op-fuser"),
        ({"use_te_activation_func": True}, "--use-te-activation-func"),
        ({"te_rng_tracker": True}, "--te-rng-tracker"),
        ({"te_precision_config_file": "precision.yaml"}, "--te-precision-config-file"),
        ({"delay_wgrad_compute": True}, "--delay-wgrad-compute"),
        ({"symmetric_ar_type": "two_shot"}, "--symmetric-ar-type"),
        ({"cpu_offloading_num_layers": 1}, "--cpu-offloading-num-layers"),
        ({"fine_grained_activation_offloading": True}, "--fine-grained-activation-offloading"),
        ({"fused_residual_rmsnorm": True}, "--fused-residual-rmsnorm"),
        ({"use_kitchen_attention": True}, "--use-kitchen-attention"),
        ({"num_query_groups": 2}, "--num-query-groups makes 2 query groups, which do not divide over 4 TP slots"),
    ],
)
def test_unsupported_settings_are_refused_by_flag_with_a_fix(changes, flag):
    with pytest.raises(Refused, match=f"{flag}.*Fix: ."):
        refuse_what_does_not_work(arguments(**changes), TrainingPolicy(), layout("r1.s0.t3"))


def test_several_unsupported_settings_are_refused_at_once_each_with_its_fix():
    changes = {"num_experts": 8, "use_torch_fsdp2": True, "num_query_groups": 2}
    with pytest.raises(
        Refused, match=r"r1\.s0\.t3 lost, 3 options are not supported: --use-torch-fsdp2 .*; --num-experts .*"
    ) as refused:
        refuse_what_does_not_work(arguments(**changes), TrainingPolicy(), layout("r1.s0.t3"))
    assert [part.split(":")[0] for part in refused.value.fix.split("; ")] == [
        "--use-torch-fsdp2",
        "--num-experts",
        "--num-query-groups",
    ]
    live = {option.flag for option in unsupported_live(live_arguments(**changes), TrainingPolicy(enabled=True))}
    assert live == {"--use-torch-fsdp2", "--num-query-groups"}


EXACT = TrainingPolicy(enabled=True, dropout="exact")
AUTO = TrainingPolicy(enabled=True)


def test_muon_is_accepted_where_no_loss_makes_a_replica_narrower():
    muon = live_arguments(optimizer="muon")
    assert [option.flag for option in unsupported_live(muon, TrainingPolicy(enabled=True))] == ["--optimizer muon"]
    assert unsupported_live(muon, TrainingPolicy(enabled=True, min_tp_width=4)) == []


def test_exact_masks_are_not_refused_degraded_or_healthy():
    for found in (layout("r1.s0.t3"), layout(processes=8)):
        refuse_what_does_not_work(arguments(attention_dropout=0.1), EXACT, found)


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"attention_dropout": 0.1, "transformer_impl": "transformer_engine"}, "--attention-dropout"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl"),
        ({"num_query_groups": 2}, "--num-query-groups"),
    ],
)
def test_inexact_masks_are_refused_before_a_loss(changes, flag):
    whole = layout(processes=8)
    with pytest.raises(Refused, match=f"{flag}.*Fix: ."):
        refuse_what_does_not_work(arguments(hidden_dropout=0.1, **changes), EXACT, whole)
    refuse_what_does_not_work(arguments(hidden_dropout=0.1, **changes), AUTO, whole)
    refuse_what_does_not_work(arguments(**{**changes, "attention_dropout": 0}), EXACT, whole)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (TrainingPolicy(batch=BatchPolicy(mode="trim")), "--ntp-batch-mode trim"),
        (TrainingPolicy(min_tp_width=4), "replica 1 is 3 slots wide in stage 0, below --ntp-min-tp-width 4"),
    ],
)
def test_an_unimplemented_policy_is_refused(policy, message):
    with pytest.raises(Refused, match=f"{message}.*Fix: ."):
        refuse_what_does_not_work(arguments(), policy, layout("r1.s0.t3"))


def live_arguments(**changes):
    return arguments(**changes)


def test_a_usual_job_may_be_live_also_with_checkpoints_and_the_distributed_optimizer():
    refuse_live(
        live_arguments(save="there", use_distributed_optimizer=True), TrainingPolicy(enabled=True, min_tp_width=4)
    )


FRAMEWORK = TrainingPolicy(enabled=True, dropout="framework")


@pytest.mark.parametrize("policy", [EXACT, AUTO], ids=["exact", "auto"])
def test_masks_of_a_live_job_are_exact(policy):
    changes = live_arguments(hidden_dropout=0.1, attention_dropout=0.1)
    refuse_live(changes, policy)
    assert draws_exact_masks(changes, policy)


def test_the_frameworks_masks_are_refused_in_a_live_job():
    with pytest.raises(Refused, match=r"--hidden-dropout 0\.1 would draw other masks.*Fix: --ntp-dropout auto"):
        refuse_live(live_arguments(hidden_dropout=0.1), FRAMEWORK)


def test_masks_that_kernels_draw_are_refused_by_exact_and_accepted_by_auto():
    changes = live_arguments(attention_dropout=0.1, transformer_impl="transformer_engine")
    refuse_live(changes, AUTO)
    with pytest.raises(Refused, match=r"--attention-dropout is drawn inside.*Fix: --ntp-dropout auto"):
        refuse_live(changes, EXACT)


@pytest.mark.parametrize("changes", [{}, {"hidden_dropout": 0.1, "mtp_num_layers": 1}])
def test_auto_leaves_the_frameworks_masks_where_there_are_none_or_they_cannot_be_exact(changes):
    assert not draws_exact_masks(arguments(**changes), AUTO)
    refuse_what_does_not_work(arguments(**changes), AUTO, layout(processes=8))


@pytest.mark.parametrize("refusal", LIVE, ids=lambda refusal: refusal.flag)
def test_settings_unsupported_in_live_jobs_are_refused_at_the_start(refusal):
    name = refusal.flag.removeprefix("--").replace("-", "_")
    with pytest.raises(Refused, match=f"{refusal.flag} .*Fix: ."):
        refuse_live(live_arguments(**{name: 1}), TrainingPolicy(enabled=True))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (TrainingPolicy(batch=BatchPolicy(mode="trim")), "--ntp-batch-mode trim"),
        (TrainingPolicy(min_tp_width=5), "--ntp-min-tp-width 5 is above --tensor-model-parallel-size 4"),
    ],
)
def test_a_policy_that_no_loss_could_be_met_with_is_refused_at_the_start(policy, message):
    with pytest.raises(Refused, match=f"{message}.*Fix: ."):
        refuse_live(live_arguments(), policy)


def test_flags_win_over_the_file(tmp_path):
    parser = argparse.ArgumentParser()
    parser.add_argument("--ntp-config")
    schema.add_flags(parser, TrainingPolicy, prefix="ntp-")
    file = tmp_path / "job.toml"
    file.write_text('[ntp]\nenabled = true\nlost = ["r1.s0.t3"]\ngranule = 16\n')
    policy = read_policy(parser.parse_args(["--ntp-config", str(file), "--ntp-granule", "8"]))
    assert (policy.enabled, policy.lost, policy.granule) == (True, ("r1.s0.t3",), 8)
    assert read_policy(parser.parse_args([])) == TrainingPolicy()
    file.write_text("[ntp]\nloost = []\n")
    with pytest.raises(ConfigError, match=r"job.toml: ntp.loost is not a known key.*did you mean \"lost\""):
        read_policy(parser.parse_args(["--ntp-config", str(file)]))


def test_every_refusal_has_a_fix():
    assert all(refusal.flag.startswith("--") and refusal.why and refusal.fix for refusal in (*TABLE, *EXACT_MASKS))
