"""Options that a degraded layout, or exact masks, do not support, refused at start by their flag.

A line here promises that nothing is computed wrongly in silence. Whoever builds a feature removes its line.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ntp_plugin.config.sections import TrainingPolicy
from ntp_plugin.errors import Refused
from ntp_plugin.megatron.layout import Layout
from ntp_plugin.megatron.refusals import Refusal, above, given, not_built, not_planned
from ntp_plugin.megatron.stage_layers import has_an_empty_stage, predicts_before_the_loss
from ntp_plugin.megatron.unsupported_experts import EXPERTS, EXPERTS_PLANNED, NO_MEMORY_LIMIT
from ntp_plugin.planning.job_check import UnsupportedOption
from ntp_plugin.planning.units import default_granule


def _has_checkpoints(args: Any) -> bool:
    """Whether the job may write or read a checkpoint."""
    return any(getattr(args, name, None) for name in ("save", "load", "pretrained_checkpoint"))


FP8_RECIPES = ("delayed", "tensorwise")
"""Recipes with one scale for each tensor: from earlier micro-batches, or its own."""


def is_fp8(args: Any) -> bool:
    """Whether matrix products are in FP8."""
    return bool(getattr(args, "fp8", None))


def fp8_recipe(args: Any) -> str:
    """Return how FP8's tensors are scaled."""
    recipe = args.fp8_recipe
    return str(getattr(recipe, "value", recipe))


_NO_HYBRID_LAYERS = {
    "M": "Mamba",
    "G": "gated delta net",
    "D": "sparse attention",
    "E": "experts",
    "/": "multi-token prediction",
}
"""Layers of a hybrid model besides attention, plain or latent, and MLP, by their symbols in the pattern."""


def _pattern(args: Any) -> str:
    """Return the pattern of a hybrid model, from either of its flags; empty for other models."""
    flags = ("hybrid_layer_pattern", "hybrid_override_pattern")
    return "".join(getattr(args, flag, None) or "" for flag in flags)


def _hybrid(symbol: str, name: str) -> Refusal:
    """Refuse layers of a hybrid model that are not built yet."""
    return not_built(
        f"--hybrid-layer-pattern with {symbol} ({name})",
        lambda args: symbol in _pattern(args),
        fix="a pattern of * (attention) or + (latent attention) and - (MLP), or start with full-width replicas",
    )


def is_latent(args: Any) -> bool:
    """Whether the model has latent attention. Megatron derives it from a pattern when it checks its arguments."""
    return bool(getattr(args, "multi_latent_attention", False)) or "+" in _pattern(args)


def has_partial_latent_keys(args: Any) -> bool:
    """Whether Megatron leaves a gradient of latent attention partial, which the plugin completes
    (`layers/latent_attention.py`)."""
    return is_latent(args) and not args.sequence_parallel and above("tensor_model_parallel_size")(args)


def keeps_matrices_whole(args: Any) -> bool:
    """Whether no loss narrows a replica: there is one TP slot, or what it has are experts or parts of sequences; and
    each slot steps its own part of a matrix."""
    if args.tensor_model_parallel_size == 1:
        return True
    never_narrowed = given("num_experts")(args) or above("context_parallel_size")(args)
    return bool(never_narrowed and getattr(args, "muon_tp_mode", "blockwise") == "blockwise")


TABLE: tuple[Refusal, ...] = (
    *EXPERTS,
    not_built(
        "--pipeline-model-parallel-layout with m before the last stage",
        predicts_before_the_loss,
        fix="multi-token prediction in the stage of the loss: a layout that ends with mL",
    ),
    Refusal(
        flag="--pipeline-model-parallel-layout with an empty stage",
        applies=has_an_empty_stage,
        why="has ranks without any layer, which would have nothing to sum or to recover",
        fix="give every stage a layer, the embedding or the loss",
    ),
    not_built("--pipeline-model-parallel-comm-backend"),
    not_built("--use-ring-exchange-p2p"),
    not_built("--use-torch-fsdp2"),
    not_built("--use-megatron-fsdp"),
    Refusal(
        flag="--multi-latent-attention with --transformer-impl local",
        applies=lambda args: is_latent(args) and args.transformer_impl == "local",
        why="is a model that Megatron does not build: its own layers know one width of heads alone",
        fix="--transformer-impl transformer_engine",
    ),
    Refusal(
        flag="--mla-down-proj-fusion",
        applies=given("mla_down_proj_fusion"),
        why="cuts the two down-projections as one matrix, in parts that depend on the width",
        fix="leave it out",
    ),
    Refusal(
        flag="--cache-mla-latents",
        applies=given("cache_mla_latents"),
        why="is for inference: Megatron does not train with it",
        fix="leave it out",
    ),
    not_built(
        "--mtp-num-layers with --context-parallel-size",
        lambda args: given("mtp_num_layers")(args) and above("context_parallel_size")(args),
        fix="--context-parallel-size 1, or leave --mtp-num-layers out",
    ),
    not_built(
        "--mtp-num-layers with --hybrid-layer-pattern",
        lambda args: given("mtp_num_layers")(args) and _pattern(args),
        fix="leave --mtp-num-layers out",
    ),
    not_built(
        "--mtp-num-layers with --fp8-format",
        lambda args: given("mtp_num_layers")(args) and is_fp8(args),
        fix="leave one of the two out",
    ),
    not_built("--mtp-standalone"),
    not_built("--mtp-detach-heads"),
    not_built("--mtp-hybrid-override-pattern"),
    Refusal(
        flag="--fp8-recipe",
        applies=lambda args: is_fp8(args) and fp8_recipe(args) not in FP8_RECIPES,
        why="scales by blocks or by code of yours, which nobody has tried with uneven layers",
        fix="--fp8-recipe delayed or tensorwise",
    ),
    not_built("--fp8-param-gather"),
    not_built("--first-last-layers-bf16"),
    not_built("--no-fp8-wgrad", lambda args: is_fp8(args) and not args.fp8_wgrad),
    not_built(
        "--fp8-format with --pipeline-model-parallel-size",
        lambda args: is_fp8(args) and above("pipeline_model_parallel_size")(args),
    ),
    not_built(
        "--fp8-format with --recompute-granularity",
        lambda args: is_fp8(args) and getattr(args, "recompute_granularity", None),
    ),
    not_built("--fp8-format with --multi-latent-attention", lambda args: is_fp8(args) and is_latent(args)),
    not_built(
        "--fp8-format with --context-parallel-size",
        lambda args: is_fp8(args) and above("context_parallel_size")(args),
        fix="--context-parallel-size 1, or leave --fp8-format out",
    ),
    not_built("--fp4-format", given("fp4")),
    Refusal(
        flag="--ckpt-format",
        applies=lambda args: (
            _has_checkpoints(args) and getattr(args, "ckpt_format", "torch_dist") not in ("torch_dist", "torch")
        ),
        why="is for FSDP, which is not built yet for replicas of different width",
        fix="--ckpt-format torch_dist",
    ),
    not_built("--ckpt-convert-format"),
    not_built("--load-main-params-from-ckpt"),
    Refusal(
        flag="--non-persistent-ckpt-type local",
        applies=lambda args: getattr(args, "non_persistent_ckpt_type", None) == "local",
        why="needs nvidia_resiliency_ext, whose files fit the layout that wrote them, and nobody has tried it here",
        fix="--non-persistent-ckpt-type global; or copies in memory (--ntp-copies-protect all)",
    ),
    not_built("--yaml-cfg"),
    not_built("--heterogeneous-layers-config-path"),
    not_built("--perform-rl-step"),
    not_built("--qk-clip"),
    not_built("--sft"),
    not_built("--init-model-with-meta-device"),
    not_built("--use-precision-aware-optimizer"),
    not_built("--optimizer-cpu-offload"),
    not_built("--decrease-batch-size-if-needed"),
    not_built("--tensor-parallel-num-weight-shards", lambda args: args.tensor_parallel_num_weight_shards),
    not_built("--expert-tensor-parallel-num-weight-shards"),
    not_built("--cuda-graph-impl", lambda args: getattr(args, "cuda_graph_impl", "none") != "none"),
    not_built("--enable-cuda-graph"),
    not_built("--external-cuda-graph"),
    not_built("--optimizer-cuda-graph"),
    not_built("--hybrid-context-parallel"),
    not_built("--heterogeneous-layers-config-encoded-json"),
    not_built("--inprocess-restart"),
    not_built("--skip-train"),
    not_built("--freeze-all-layers"),
    not_built(
        "--experimental-attention-variant",
        lambda args: getattr(args, "experimental_attention_variant", None) not in (None, "gated_delta_net"),
        fix="--experimental-attention-variant gated_delta_net, or start with full-width replicas",
    ),
    Refusal(
        flag="--experimental-attention-variant without --sequence-parallel",
        applies=lambda args: (
            given("experimental_attention_variant")(args)
            and above("tensor_model_parallel_size")(args)
            and not given("sequence_parallel")(args)
        ),
        why="leaves the gradient of its last norm partial, so that each slot trains a norm of its own",
        fix="add --sequence-parallel",
    ),
    *(
        Refusal(
            flag=f"--save-{what}-interval",
            applies=given(f"save_{what}_interval"),
            why="writes the parts of one replica as if its slots held even shares",
            fix="leave it out",
        )
        for what in ("params", "wgrads", "dgrads", "activations")
    ),
    *(
        Refusal(
            flag=flag,
            applies=given(flag.removeprefix("--").replace("-", "_")),
            why="identifies logits by the nominal rank that computed a micro-batch, and here other ranks compute it",
            fix="leave it out, or start with full-width replicas",
        )
        for flag in ("--logits-save-dir", "--logits-load-dir")
    ),
    *(
        Refusal(
            flag=flag,
            applies=given(flag.removeprefix("--").replace("-", "_")),
            why="skips as many micro-batches as a full-width replica would have had",
            fix="leave it out, or start with full-width replicas",
        )
        for flag in ("--iterations-to-skip", "--result-rejected-tracker-filename")
    ),
    Refusal(
        flag="--phase-transition-iterations",
        applies=given("phase_transition_iterations"),
        why="numbers the samples of each phase from zero, and loaders here go by those of the whole training",
        fix="leave it out",
    ),
    Refusal(
        flag="--softmax-type",
        applies=lambda args: getattr(args, "softmax_type", None) == "learnable",
        why="learnable has a number for each head that Megatron does not mark as cut",
        fix="--softmax-type vanilla or off-by-one",
    ),
    Refusal(
        flag="--distribute-saved-activations",
        applies=given("distribute_saved_activations"),
        why="cuts activations into as many even parts as the replica has slots, and they may not divide",
        fix="leave it out",
    ),
    Refusal(
        flag="--cross-entropy-fusion-impl",
        applies=lambda args: getattr(args, "cross_entropy_fusion_impl", None) == "te",
        why="te assumes that all earlier slots are as wide as this one",
        fix="--cross-entropy-fusion-impl native",
    ),
    Refusal(
        flag="--ddp-param-name-patterns-for-fp32-local-accumulation",
        applies=given("ddp_param_name_patterns_for_fp32_local_accumulation"),
        why="keeps gradients outside of the buckets that are scaled and summed",
        fix="--accumulate-allreduce-grads-in-fp32",
    ),
    Refusal(
        flag="--ddp-reduce-scatter-with-fp32-accumulation",
        applies=given("ddp_reduce_scatter_with_fp32_accumulation"),
        why="is a way to sum that lanes do not have: they would sum in the gradients' own precision",
        fix="--accumulate-allreduce-grads-in-fp32",
    ),
    Refusal(
        flag="--lazy-mpu-init",
        applies=given("lazy_mpu_init"),
        why="says that every replica has the nominal width",
        fix="leave it out",
    ),
    Refusal(
        flag="--no-initialization",
        applies=lambda args: getattr(args, "perform_initialization", True) is False,
        why="leaves weights as they are found in memory, and they cannot be loaded",
        fix="leave it out",
    ),
    *(_hybrid(symbol, name) for symbol, name in _NO_HYBRID_LAYERS.items()),
    not_built("--use-transformer-engine-op-fuser"),
    not_built("--use-te-activation-func"),
    not_built("--fused-residual-rmsnorm"),
    not_built("--te-rng-tracker"),
    not_built("--te-precision-config-file"),
    not_built("--delay-wgrad-compute"),
    not_built("--symmetric-ar-type"),
    not_built("--cpu-offloading-num-layers", above("cpu_offloading_num_layers", 0)),
    not_built("--fine-grained-activation-offloading"),
    not_built("--use-kitchen-attention"),
    not_built("--transformer-impl inference_optimized", lambda args: args.transformer_impl == "inference_optimized"),
    Refusal(
        flag="--data-parallel-random-init",
        applies=given("data_parallel_random_init"),
        why="sends weights from replica to replica in the order of their bytes, which differs with the width",
        fix="leave it out: all replicas draw the same weights",
    ),
    Refusal(
        flag="--dataloader-type",
        applies=lambda args: args.dataloader_type not in (None, "single"),
        why="distributes samples evenly by itself",
        fix="--dataloader-type single",
    ),
    Refusal(
        flag="--optimizer",
        applies=lambda args: args.optimizer not in ("adam", "sgd", "muon"),
        why="is not element-wise, or nobody has tried it: a unit of a matrix would depend on its place",
        fix="--optimizer adam, sgd or muon",
    ),
    Refusal(
        flag="--optimizer muon",
        applies=lambda args: args.optimizer == "muon" and not keeps_matrices_whole(args),
        why="steps whole matrices, and a narrower replica would have other ones",
        fix="--tensor-model-parallel-size 1, or --optimizer adam; with experts, --muon-tp-mode blockwise",
    ),
    not_built(
        "--optimizer muon with --use-distributed-optimizer",
        lambda args: args.optimizer == "muon" and getattr(args, "use_distributed_optimizer", False),
        fix="--optimizer muon without it: each rank then keeps what Muon keeps for all matrices",
    ),
)


MEMORY_LIMIT: tuple[Refusal, ...] = (
    Refusal(
        flag="--context-parallel-size with --ntp-gpu-memory-gb",
        applies=above("context_parallel_size"),
        why="plans memory for whole sequences, and a rank has a part of each",
        fix="leave --ntp-gpu-memory-gb out",
    ),
    NO_MEMORY_LIMIT,
    Refusal(
        flag="--experimental-attention-variant with --ntp-gpu-memory-gb",
        applies=given("experimental_attention_variant"),
        why="plans memory for attention, and a gated delta net keeps other things for its backward",
        fix="leave --ntp-gpu-memory-gb out",
    ),
    Refusal(
        flag="--mtp-num-layers with --ntp-gpu-memory-gb",
        applies=given("mtp_num_layers"),
        why="weighs its losses by the tokens of a whole micro-batch, and here a micro-batch may be split",
        fix="leave --ntp-gpu-memory-gb out",
    ),
)
"""What does not work if a GPU's memory for the job is given, by its flag or in a file."""

PLANNED: tuple[Refusal, ...] = (
    *EXPERTS_PLANNED,
    not_planned("--experimental-attention-variant", given("experimental_attention_variant")),
    not_planned("--context-parallel-size", above("context_parallel_size")),
    not_planned("--use-tp-pp-dp-mapping", given("use_tp_pp_dp_mapping")),
    Refusal(
        flag="--use-cpu-initialization",
        applies=lambda args: not args.use_cpu_initialization,
        why="is needed: if weights are drawn on GPUs, nobody knows those of a lost slot",
        fix="--use-cpu-initialization",
    ),
)
"""What a job that begins degraded cannot do without.

A live job gets a lost slot's units from the others, and not from a draw.
"""


def attention_draws_by_itself(args: Any) -> bool:
    """Whether a kernel of attention draws its own masks, which depend on the layout."""
    return args.transformer_impl != "local" and above("attention_dropout", 0)(args)


EXACT_MASKS: tuple[Refusal, ...] = (
    Refusal(
        flag="--mtp-num-layers",
        applies=given("mtp_num_layers"),
        why="numbers its layers from one again, so they would have the masks of others",
        fix="leave it out",
    ),
    Refusal(
        flag="--cuda-graph-impl",
        applies=lambda args: getattr(args, "cuda_graph_impl", "none") != "none",
        why="plays back the masks that it has recorded",
        fix="--cuda-graph-impl none",
    ),
)
"""What exact masks do not support, in a healthy layout either. `--ntp-dropout auto` draws none with these."""

ALL_MASKS_EXACT: tuple[Refusal, ...] = (
    Refusal(
        flag="--attention-dropout",
        applies=attention_draws_by_itself,
        why="is drawn inside of TransformerEngine's kernels, by their own generators",
        fix="--ntp-dropout auto (all other masks are exact), --attention-dropout 0, or --transformer-impl local",
    ),
)
"""What `--ntp-dropout exact` refuses, and `auto` accepts."""

_DROPOUTS = ("hidden_dropout", "attention_dropout")


def draws_exact_masks(args: Any, policy: TrainingPolicy) -> bool:
    """Whether the job has dropouts, and the plugin draws their masks."""
    if not (policy.enabled and any(above(name, 0)(args) for name in _DROPOUTS)):
        return False
    return policy.dropout == "exact" or (policy.dropout == "auto" and not list(_no_exact_masks(args)))


LIVE: tuple[Refusal, ...] = (
    Refusal(
        flag="--log-straggler",
        applies=given("log_straggler"),
        why="gathers the times of all ranks on the process that began as rank 0: without it the log raises and ends the"
        " job, and a process that rejoins does not know whether the detector has been switched off",
        fix="leave it out; the record has the time of each step by slot (`ntp report`)",
    ),
)
"""What a degraded layout supports, but not yet in a job that degrades during training."""


def refuse_what_does_not_work(args: Any, policy: TrainingPolicy, layout: Layout) -> None:
    """Raise for all arguments that a degraded layout, or exact masks, do not support."""
    found, cause = list[UnsupportedOption](), "--ntp-dropout exact"
    if layout.lost:
        cause = f"{', '.join(map(str, sorted(layout.lost)))} lost"
        _refuse_narrow(policy, layout)
        found += [*_applying((*TABLE, *PLANNED), args), *_other_masks(args, policy), *_too_few_processes(args, layout)]
        found += [*_batch(policy), *_broken_groups(args, layout.topology.tp), *_unaligned(args, policy)]
        found += _limited(args, policy)
    if draws_exact_masks(args, policy):
        found += _inexact_masks(args, policy)
    _refuse(found, cause)


def refuse_live(args: Any, policy: TrainingPolicy) -> None:
    """Raise for all arguments that a job does not support once a slot is lost."""
    _refuse(unsupported_live(args, policy), "--ntp-enable under `ntp run`, where any slot may be lost")


def unsupported_live(args: Any, policy: TrainingPolicy) -> list[UnsupportedOption]:
    """The arguments that a job does not support once a slot is lost, each option once."""
    tp = args.tensor_model_parallel_size
    found = [*_applying((*TABLE, *LIVE), args), *_other_masks(args, policy)]
    found += _inexact_masks(args, policy) if draws_exact_masks(args, policy) else ()
    found += [*_broken_groups(args, tp), *_batch(policy), *_unaligned(args, policy), *_limited(args, policy)]
    if policy.min_tp_width > tp:
        found.append(
            UnsupportedOption(
                flag=f"--ntp-min-tp-width {policy.min_tp_width}",
                why=f"is above --tensor-model-parallel-size {tp}: the first loss would leave no replica that may train",
                fix=f"choose 1 to {tp}",
            )
        )
    return list({option.flag: option for option in reversed(found)}.values())[::-1]


def _refuse(found: Sequence[UnsupportedOption], cause: str) -> None:
    found = list({option.flag: option for option in reversed(found)}.values())[::-1]
    if len(found) == 1:
        raise Refused(f"with {cause}, {found[0]}", fix=found[0].fix)
    if found:
        raise Refused(
            f"with {cause}, {len(found)} options are not supported: {'; '.join(map(str, found))}",
            fix="; ".join(f"{option.flag}: {option.fix}" for option in found),
        )


def _applying(table: Iterable[Refusal], args: Any) -> Iterator[UnsupportedOption]:
    for refusal in table:
        if refusal.applies(args):
            yield UnsupportedOption(flag=refusal.flag, why=refusal.why, fix=refusal.fix)


def _limited(args: Any, policy: TrainingPolicy) -> Iterator[UnsupportedOption]:
    yield from _applying(MEMORY_LIMIT if policy.gpu_memory_gb is not None else (), args)


def _too_few_processes(args: Any, layout: Layout) -> Iterator[UnsupportedOption]:
    whole = layout.topology.tp * layout.topology.pp
    if getattr(args, "use_distributed_optimizer", False) and len(layout.slots) < whole:
        yield UnsupportedOption(
            flag="--use-distributed-optimizer",
            why=f"has {len(layout.slots)} processes, fewer than a full replica: Megatron's report on memory divides by "
            "how many replicas they make",
            fix="leave --use-distributed-optimizer out",
        )


def _inexact_masks(args: Any, policy: TrainingPolicy) -> Iterator[UnsupportedOption]:
    yield from _no_exact_masks(args)
    yield from _applying(ALL_MASKS_EXACT if policy.dropout == "exact" else (), args)


def _no_exact_masks(args: Any) -> Iterator[UnsupportedOption]:
    yield from _applying(EXACT_MASKS, args)
    yield from _broken_groups(args, args.tensor_model_parallel_size)


def _other_masks(args: Any, policy: TrainingPolicy) -> Iterator[UnsupportedOption]:
    for name in _DROPOUTS:
        if above(name, 0)(args) and policy.dropout != "exact" and not draws_exact_masks(args, policy):
            flag = "--" + name.replace("_", "-")
            yield UnsupportedOption(
                flag=flag,
                why=f"{getattr(args, name)} would draw other masks than with nobody lost",
                fix=f"--ntp-dropout auto, here and in the run that this one continues; or {flag} 0",
            )


def _broken_groups(args: Any, tp: int) -> Iterator[UnsupportedOption]:
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    if groups is not None and groups % tp:
        yield UnsupportedOption(
            flag="--num-query-groups",
            why=f"makes {groups} query groups, which do not divide over {tp} TP slots",
            fix=f"a query group stays whole: choose a --tensor-model-parallel-size that divides {groups}",
        )


_ALIGNED = 16
"""Values of which FP8's matrices have a multiple, in rows and columns."""


def _unaligned(args: Any, policy: TrainingPolicy) -> Iterator[UnsupportedOption]:
    """Refuse units that FP8's matrices cannot be made of: a slot holds any number of them.

    Sizes that are not given are Megatron's to choose; they are checked once it has.
    """
    if not is_fp8(args):
        return
    columns, channels, tp = args.ffn_hidden_size, args.kv_channels, args.tensor_model_parallel_size
    granule = policy.granule or (default_granule(columns, tp) if columns else _ALIGNED)
    if granule % _ALIGNED:
        yield UnsupportedOption(
            flag="--fp8-format",
            why=f"needs MLP columns in multiples of {_ALIGNED}, and a granule is {granule} of the {columns} columns",
            fix=f"--ntp-granule {_ALIGNED}, where it divides {columns} / {tp}",
        )
    if channels and channels % _ALIGNED:
        yield UnsupportedOption(
            flag="--fp8-format with --kv-channels",
            why=f"{channels} needs heads in multiples of {_ALIGNED} channels",
            fix=f"--kv-channels in multiples of {_ALIGNED}, or start with full-width replicas",
        )


def _batch(policy: TrainingPolicy) -> Iterator[UnsupportedOption]:
    if policy.batch.mode != "strict":
        yield UnsupportedOption(
            flag=f"--ntp-batch-mode {policy.batch.mode}",
            why="is not built yet on Megatron",
            fix="leave it out: strict computes every sample of the global batch",
        )


def _refuse_narrow(policy: TrainingPolicy, layout: Layout) -> None:
    for (replica, stage), pattern in layout.surviving.patterns.items():
        width = layout.topology.tp - len(pattern)
        if width < policy.min_tp_width:
            raise Refused(
                f"replica {replica} is {width} slots wide in stage {stage}, "
                f"below --ntp-min-tp-width {policy.min_tp_width}",
                fix="lower it, or leave the replica out",
            )
