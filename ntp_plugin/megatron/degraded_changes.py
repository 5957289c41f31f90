"""Options that work in a degraded layout, and differently. `ntp check` and the page of all flags show these rows.

What does not work at all is in `unsupported.py`. A row says what changes for a user, in one sentence; the code is where
`hooks.py` and `live/hooks.py` say.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from ntp_plugin.megatron.switched_off import IN_A_DEGRADED_LAYOUT, flag_of
from ntp_plugin.megatron.unsupported import attention_draws_by_itself, fp8_recipe, has_partial_latent_keys, is_fp8
from ntp_plugin.planning.job_check import ChangedOption


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DegradedChange:
    """One option: when the row applies, and what changes."""

    flag: str
    applies: Callable[[Any], object]
    change: str


def _given(name: str) -> Callable[[Any], object]:
    return lambda args: getattr(args, name, None)


def _both(one: str, other: str) -> Callable[[Any], object]:
    return lambda args: getattr(args, one, None) and getattr(args, other, None)


def _above(name: str, bound: float) -> Callable[[Any], bool]:
    return lambda args: (getattr(args, name, None) or 0) > bound


CHANGES: tuple[DegradedChange, ...] = (
    # ------------------------------------------------ what is computed
    DegradedChange(
        flag="--attention-dropout",
        applies=attention_draws_by_itself,
        change="TransformerEngine's kernels draw these masks by themselves, so after a loss they are others than"
        " without one; all other masks are exact",
    ),
    DegradedChange(
        flag="--hidden-dropout",
        applies=_above("hidden_dropout", 0),
        change="the masks stay those of a run with nobody lost; for that, dropout, bias and residual are not one fused"
        " kernel, from the first step on",
    ),
    DegradedChange(
        flag="--cross-entropy-loss-fusion",
        applies=_given("cross_entropy_loss_fusion"),
        change="Megatron's fused cross entropy rounds its gradient to bf16, so two widths differ by that rounding",
    ),
    DegradedChange(
        flag="--sequence-parallel",
        applies=_given("sequence_parallel"),
        change="where the width does not divide the sequence, the last slots of a degraded replica carry pad rows",
    ),
    DegradedChange(
        flag="--context-parallel-size",
        applies=_above("context_parallel_size", 1),
        change="a replica that has lost a slot is left out, and the others of its context group share each sequence, as"
        " many of them as divide this number; they run fewer micro-batches",
    ),
    DegradedChange(
        flag="--hierarchical-context-parallel-sizes",
        applies=_given("hierarchical_context_parallel_sizes"),
        change="all context groups exchange in one ring (p2p) while a slot is lost: a smaller group has no two levels"
        " of these sizes",
    ),
    DegradedChange(
        flag="--num-experts",
        applies=_given("num_experts"),
        change="a replica that has lost a slot is left out, and its experts go to the other slots of its expert group;"
        " replicas of a group run alike many micro-batches, the last ones with weight zero where they have fewer",
    ),
    DegradedChange(
        flag="--moe-token-dispatcher-type",
        applies=_given("num_experts"),
        change="an expert group that has lost a slot exchanges its tokens directly, whatever the type",
    ),
    DegradedChange(
        flag="--fp8-format",
        applies=lambda args: is_fp8(args) and fp8_recipe(args) == "delayed",
        change="delayed scales follow a replica's own micro-batches within a step, and are evened out over the replicas"
        " at its end, so two layouts differ by FP8's rounding, as two widths do in Megatron alone",
    ),
    DegradedChange(
        flag="--multi-latent-attention",
        applies=has_partial_latent_keys,
        change="without --sequence-parallel Megatron's gradients lack the heads of other TP slots in what all heads"
        " share of the keys (Megatron-LM issue 1699); the plugin adds them, from the first step on",
    ),
    DegradedChange(
        flag="--mtp-num-layers",
        applies=_given("mtp_num_layers"),
        change="where a rank is lost between a step and its log, the log of that interval is without the losses of"
        " multi-token prediction; with a dropout above 0 the job is refused, since masks depend on the layout",
    ),
    DegradedChange(
        flag="--micro-batch-size",
        applies=_both("ntp_gpu_memory_gb", "calculate_per_token_loss"),
        change="a degraded replica that would not fit into --ntp-gpu-memory-gb splits its micro-batches",
    ),
    DegradedChange(
        flag="--global-batch-size",
        applies=_given("global_batch_size"),
        change="stays as it is: a degraded replica runs fewer micro-batches, and the others run its share",
    ),
    DegradedChange(
        flag="--step-batch-size-schedule",
        applies=_given("step_batch_size_schedule"),
        change="each size is shared out among the replicas by their widths; a size that does not divide over full-width"
        " replicas is refused at the start",
    ),
    DegradedChange(
        flag="--fp16",
        applies=_given("fp16"),
        change="a micro-batch of a degraded replica weighs as in a full-width one, so the same gradients overflow",
    ),
    # ------------------------------------------------ how it is computed
    *(
        DegradedChange(flag=flag_of(name), applies=_given(name), change=f"is left out: {instead}")
        for name, instead in IN_A_DEGRADED_LAYOUT.items()
    ),
    DegradedChange(
        flag="--pipeline-model-parallel-size",
        applies=_above("pipeline_model_parallel_size", 1),
        change="beside a degraded stage, some slots send to several slots of the next stage",
    ),
    DegradedChange(
        flag="--num-layers-per-virtual-pipeline-stage",
        applies=_given("num_layers_per_virtual_pipeline_stage"),
        change="replicas share out groups of micro-batches, not single ones",
    ),
    DegradedChange(
        flag="--num-virtual-stages-per-pipeline-rank",
        applies=_above("num_virtual_stages_per_pipeline_rank", 1),
        change="replicas share out groups of micro-batches, not single ones",
    ),
    DegradedChange(
        flag="--pipeline-model-parallel-layout",
        applies=_given("pipeline_model_parallel_layout"),
        change="if it has several virtual stages for each rank, replicas share out groups of micro-batches, not single"
        " ones",
    ),
    DegradedChange(
        flag="--use-distributed-optimizer",
        applies=_given("use_distributed_optimizer"),
        change="optimizer state is sharded lane by lane; a lost rank's part comes from copies in memory, so the steps"
        " since the newest copies are taken again",
    ),
    DegradedChange(
        flag="--num-distributed-optimizer-instances",
        applies=_above("num_distributed_optimizer_instances", 1),
        change="optimizer state is sharded once over all replicas, and by instances again when all slots are back",
    ),
    DegradedChange(
        flag="--overlap-grad-reduce",
        applies=_given("overlap_grad_reduce"),
        change="buckets are cut by the sizes of full parameters, so that all widths have the same",
    ),
    DegradedChange(
        flag="--overlap-param-gather",
        applies=_given("overlap_param_gather"),
        change="all parameters are on their way after the step, in one order on all ranks, and take one more copy of"
        " them in memory",
    ),
    # ------------------------------------------------ checkpoints
    DegradedChange(
        flag="--non-persistent-save-interval",
        applies=_given("non_persistent_save_interval"),
        change="the newest complete checkpoint stays until the next one is written; Megatron keeps the one with the"
        " highest number, which a loss may have made void",
    ),
    DegradedChange(
        flag="--use-checkpoint-args",
        applies=_given("use_checkpoint_args"),
        change="a process that takes a lost slot reads them from the newest checkpoint by itself; its settings are"
        " compared with the others' before it joins",
    ),
    DegradedChange(
        flag="--ckpt-format",
        applies=lambda args: args.ckpt_format == "torch" and args.save,
        change="what is saved while slots are lost is in torch_dist; a job with --ntp-enable loads either format",
    ),
    DegradedChange(
        flag="--save",
        applies=_given("save"),
        change="generators of random numbers and the state of the rerun machine are left out of a checkpoint that is"
        " saved while ranks are lost; it has more and smaller parts",
    ),
    DegradedChange(
        flag="--load",
        applies=_given("load"),
        change="a process that takes a lost slot loads nothing: the other ranks send it their state. In a job that"
        " begins degraded every rank reads all that it holds, and the replicas compare their weights",
    ),
    DegradedChange(
        flag="--dist-ckpt-optim-fully-reshardable",
        applies=_both("use_distributed_optimizer", "save"),
        change="the optimizer is written in this format while ranks are lost, with or without the flag",
    ),
    DegradedChange(
        flag="--ckpt-fully-parallel-load",
        applies=_both("ckpt_fully_parallel_load", "load"),
        change="has no effect in a job that begins degraded: every rank reads all that it holds",
    ),
    DegradedChange(
        flag="--ckpt-assume-constant-structure",
        applies=_given("ckpt_assume_constant_structure"),
        change="what Megatron has cached of the structure is dropped for the first save after a loss or a return",
    ),
    DegradedChange(
        flag="--async-save",
        applies=_given("async_save"),
        change="a loss while ranks write makes the save void; it is taken again at the end of the next step",
    ),
    DegradedChange(
        flag="--async-strategy",
        applies=_given("async_save"),
        change="a thread of each rank writes, whatever this flag says, from the start of a live job on",
    ),
    # ------------------------------------------------ evaluation and logs
    DegradedChange(
        flag="--eval-iters",
        applies=_above("eval_iters", 0),
        change="while a replica is dropped, its part of the validation samples is not evaluated",
    ),
    DegradedChange(
        flag="--check-weight-hash-across-dp-replicas-interval",
        applies=_given("check_weight_hash_across_dp_replicas_interval"),
        change="replicas are compared as by --ntp-watch-steps, which names the weight and the slots that differ",
    ),
    DegradedChange(
        flag="--log-params-norm",
        applies=_given("log_params_norm"),
        change="is left out of the log of a step that a loss follows at once",
    ),
    DegradedChange(
        flag="--timing-log-level",
        applies=_above("timing_log_level", 0),
        change="timers that a loss interrupts are left out of the log",
    ),
    DegradedChange(
        flag="--tensorboard-dir",
        applies=_given("tensorboard_dir"),
        change="gets ntp/epoch, ntp/recovery_s, ntp/lost and the width of each replica for every recovery",
    ),
    DegradedChange(
        flag="--wandb-project",
        applies=_given("wandb_project"),
        change="gets ntp/epoch, ntp/recovery_s, ntp/lost and the width of each replica for every recovery",
    ),
)


def changes(args: Any) -> Iterator[ChangedOption]:
    """Yield what changes for these arguments while ranks are lost."""
    for row in CHANGES:
        if row.applies(args):
            yield ChangedOption(flag=row.flag, change=row.change)
