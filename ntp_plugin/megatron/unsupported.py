"""Options that a degraded layout, or exact masks, do not support, refused at start by their flag.

A line here promises that nothing is computed wrongly in silence. Whoever builds a feature removes its line.
"""

from collections.abc import Callable
from typing import Any

from ntp_plugin.megatron.refusals import Refusal, above, given, not_built, not_planned
from ntp_plugin.megatron.stage_layers import has_an_empty_stage, predicts_before_the_loss
from ntp_plugin.megatron.unsupported_experts import EXPERTS, EXPERTS_PLANNED, NO_MEMORY_LIMIT


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
)


MEMORY_LIMIT: tuple[Refusal, ...] = (
    not_built(
        "--context-parallel-size with --ntp-gpu-memory-gb",
        above("context_parallel_size"),
        fix="leave --ntp-gpu-memory-gb out; `ntp plan` has the memory of such a job",
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


def _not_moved(flag: str, applies: Callable[[Any], object]) -> Refusal:
    return Refusal(
        flag=flag,
        applies=applies,
        why="is not built yet for replicas that have lost a stage",
        fix="leave that replica out: start fewer processes, and divide the global batch by their number",
    )


MOVED: tuple[Refusal, ...] = (
    _not_moved("--num-experts", given("num_experts")),
    _not_moved("--mtp-num-layers", given("mtp_num_layers")),
    _not_moved("--hybrid-layer-pattern", _pattern),
    _not_moved("--fp8-format", is_fp8),
    _not_moved("--pipeline-model-parallel-layout", given("pipeline_model_parallel_layout")),
    *(
        _not_moved("--" + name.replace("_", "-"), given(name))
        for name in (
            *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
            *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
        )
    ),
)
"""What does not work in a job that begins without a stage of some replica."""


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
