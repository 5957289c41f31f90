"""What `ntp check` finds out about a Megatron command line, without a model, other ranks or a GPU.

Options are refused by the tables that refuse them at the start of a job (`unsupported.py`). Losses and memory are
planned as a live job plans them, on units that follow from the model's shape, since there is no model to describe.
Megatron's own check of its arguments needs the job's processes, so the few values that it derives are derived here.
"""

import copy
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ntp_plugin.config.sections import (
    Batch,
    CopyPolicy,
    Hardware,
    Model,
    Parallel,
    TrainingPolicy,
    require_expert_layout,
)
from ntp_plugin.errors import ConfigError, Refused
from ntp_plugin.megatron import activation, recipe_check
from ntp_plugin.megatron.batch_schedule import FLAG as SCHEDULE
from ntp_plugin.megatron.batch_schedule import BatchSchedule, batch_schedule
from ntp_plugin.megatron.checkpoint_arguments import read_checkpoint_arguments
from ntp_plugin.megatron.degraded_changes import changes
from ntp_plugin.megatron.job_shape import expert_slots, guard_of, makes_copies, taken_together
from ntp_plugin.megatron.moved_layers import layers_of, why_none_moves
from ntp_plugin.megatron.option_checks import unsupported_live
from ntp_plugin.megatron.stage_layers import nominal_depths, require_all_layers, stage_layers
from ntp_plugin.planning.decision import as_allowed
from ntp_plugin.planning.expert_groups import require_experts_in_all_stages, require_whole_groups
from ntp_plugin.planning.job_check import CheckedJob, JobCheck, StartedRanks, examined, refused
from ntp_plugin.planning.recovery_plan import Nominal, plan_recovery, within_memory
from ntp_plugin.planning.topology import Topology
from ntp_plugin.planning.units import ModelUnits, transformer_units
from ntp_plugin.tested_versions.comparison import refusal, warning

ENABLE = "--ntp-enable"
_MAIN_BYTES, _MOMENT_BYTES = 4, 4
_USUAL_HOST = 8
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
_SIZES = (
    *_REQUIRED,
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "micro_batch_size"),
    *("global_batch_size", "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("ffn_hidden_size", "kv_channels", "vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by"),
)


def check_job(flags: Sequence[str], ranks: StartedRanks) -> JobCheck:
    """Check a command line.

    Args:
        flags: The words behind the script; without `--ntp-enable` they are checked as if it were there.
        ranks: The processes that `ntp run` would start.

    Raises:
        ConfigError: Megatron's parser refuses the flags, one is missing, or they do not fit the processes.
    """
    enabled = ENABLE in flags
    args, unknown = recipe_check.parsed(flags if enabled else [*flags, ENABLE])
    read = read_checkpoint_arguments(args)
    policy = activation.read_policy(args)
    _require_a_live_job(args, policy)
    topology = _topology(args, policy, ranks)
    check = JobCheck(
        framework="megatron",
        unsupported=tuple(unsupported_live(args, policy)),
        topology=topology,
        notes=(*_notes(unknown, ranks, topology, enabled=enabled), *([read] if read else [])),
    )
    if (error := refusal("megatron")) is not None:
        check = refused(check, error, flag="the installed version")
    return check if check.unsupported else _examined(check, args, policy)


def _examined(check: JobCheck, args: Any, policy: TrainingPolicy) -> JobCheck:
    """Add what only an accepted job has; planning may still refuse it, as at the start of the job."""
    knows_vocabulary, args = bool(args.vocab_size or args.padded_vocab_size), derived(args, check.topology)
    schedule = batch_schedule(args)
    flag = "--global-batch-size" if args.step_batch_size_schedule is None else SCHEDULE
    try:
        if flag == SCHEDULE:
            schedule.require_equal_replicas(args.micro_batch_size, check.topology.contexts)
        taken_together(args, check.topology.contexts, schedule.sizes)
        flag = "the layout"
        nominal = _nominal(check.topology, args, policy, schedule)
        plan_recovery(_layout_alone(nominal), lost=frozenset())
        flag = "--ntp-gpu-memory-gb"
        nominal = as_allowed(within_memory(nominal))
    except Refused as error:
        return refused(check, error, flag=flag)
    notes = (*_notes_of_accepted(nominal, policy, knows_vocabulary=knows_vocabulary), *_notes_of_model(args))
    check = dataclasses.replace(check, changes=tuple(changes(args)), notes=(*check.notes, *notes))
    return examined(
        check,
        CheckedJob(nominal=nominal, copies=_copies(check.topology, args, policy), copied_bytes=_copied(args)),
    )


# ---------------------------------------------------------------- the layout


def _require_a_live_job(args: Any, policy: TrainingPolicy) -> None:
    if policy.lost:
        raise ConfigError(
            "--ntp-lost names slots that are missing from the start, and the check is for jobs under `ntp run`",
            fix="leave --ntp-lost out here; such a job is checked when it starts",
        )
    small = {name: value for name in _SIZES if (value := getattr(args, name)) is not None and value < 1}
    if small:
        raise ConfigError(f"{_flags(small)} below 1", fix="give a size of 1 or more")
    if args.step_batch_size_schedule is not None and args.global_batch_size is not None:
        raise ConfigError(f"{SCHEDULE} and --global-batch-size: Megatron would not start", fix="give one of them")
    missing = [name for name in _REQUIRED if getattr(args, name) is None and not _is_hybrid(args, name)]
    if missing:
        raise ConfigError(f"{_flags(missing)} missing: Megatron would not start", fix="give all flags of the job")


def _flags(names: Iterable[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)


def _is_hybrid(args: Any, name: str) -> bool:
    """Whether the number of layers follows from a pattern."""
    return name == "num_layers" and bool(args.hybrid_layer_pattern or args.hybrid_override_pattern)


def _topology(args: Any, policy: TrainingPolicy, ranks: StartedRanks) -> Topology:
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    replica = tp * pp * args.context_parallel_size
    size = _assumed_size(args, replica) if ranks.size is None else ranks.size
    if size % replica:
        raise ConfigError(
            f"{size} processes do not make replicas of {replica} (tensor x pipeline x context parallel)",
            fix=f"a multiple of {replica}",
        )
    levels = {"nodes_per_rack": policy.nodes_per_rack, "racks_per_power_row": policy.racks_per_power_row}
    known = {name: value for name, value in levels.items() if value is not None}
    per_host = ranks.per_host or min(size, _USUAL_HOST)
    parallel = Parallel(
        tp=tp,
        pp=pp,
        cp=args.context_parallel_size,
        dp=size // replica,
        dp_last=bool(args.use_tp_pp_dp_mapping),
        gpus_per_node=per_host,
        **known,
    )
    topology = dataclasses.replace(Topology.of(parallel), expert_slots=expert_slots(args))
    if topology.expert_slots:
        require_whole_groups(topology)
    return topology


def _assumed_size(args: Any, replica: int) -> int:
    """Return a number of processes that this command line could have: a host of eight, or two replicas, if the global
    batch divides in all of its sizes."""
    most = max(2, _USUAL_HOST // replica, 2 * expert_slots(args) // args.tensor_model_parallel_size)
    micro_batches = math.gcd(*(size or 0 for size in batch_schedule(args).sizes)) // (args.micro_batch_size or 1)
    return int(replica * next((count for count in range(most, 0, -1) if micro_batches % count == 0), 1))


# ---------------------------------------------------------------- what Megatron derives


def derived(args: Any, topology: Topology) -> Any:
    """Return a copy of parsed arguments with the values that Megatron's check of them derives."""
    args = copy.copy(args)
    args.hybrid_layer_pattern = args.hybrid_layer_pattern or args.hybrid_override_pattern
    if args.hybrid_layer_pattern:
        args.num_layers = sum(args.hybrid_layer_pattern.count(symbol) for symbol in "*+-")
    if args.ffn_hidden_size is None:
        wide = 4 * args.hidden_size
        args.ffn_hidden_size = int((wide * 2 / 3) / 64) * 64 if args.swiglu else wide
    if args.kv_channels is None:
        args.kv_channels = args.hidden_size // args.num_attention_heads
    if args.bf16 and not args.grad_reduce_in_bf16:
        args.accumulate_allreduce_grads_in_fp32 = True
    args.micro_batch_size = args.micro_batch_size or 1
    args.global_batch_size = args.global_batch_size or args.micro_batch_size * topology.contexts
    args.padded_vocab_size = args.padded_vocab_size or _padded(args)
    require_all_layers(args)
    args.virtual_pipeline_model_parallel_size = _chunks(args)
    return args


def _padded(args: Any) -> int:
    """Return the vocabulary's rows, or the least there can be if only the tokenizer's files know them."""
    multiple: int = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return math.ceil((args.vocab_size or 1) / multiple) * multiple


def _chunks(args: Any) -> int | None:
    """Return the model chunks of each stage, or None if the pipeline is not interleaved."""
    chunks: int | None = args.num_virtual_stages_per_pipeline_rank
    if (stages := stage_layers(args)) is not None:
        chunks = len(stages[0])
    if chunks is None and args.num_layers_per_virtual_pipeline_stage is not None:
        layers = (
            args.num_layers + args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
        )
        chunks = layers // args.pipeline_model_parallel_size // args.num_layers_per_virtual_pipeline_stage
    return int(chunks) if chunks and chunks > 1 else None


# ---------------------------------------------------------------- the job as planning sees it


def _nominal(topology: Topology, args: Any, policy: TrainingPolicy, schedule: BatchSchedule) -> Nominal:
    together = taken_together(args, topology.contexts, schedule.sizes)
    guard = guard_of(args, math.inf if policy.gpu_memory_gb is None else policy.gpu_memory_gb * 1e9)
    return Nominal(
        topology=topology,
        units=_units(guard.model, args, policy, topology),
        batch=Batch(micro_batch=args.micro_batch_size * together, global_batch=schedule.largest),
        state=guard.state,
        hardware=Hardware(),
        policy=policy,
        splits=together,
        guard=None if policy.gpu_memory_gb is None else guard,
        layers=None if why_none_moves(args, policy, topology) else layers_of(args, policy, topology),
    )


def _units(model: Model, args: Any, policy: TrainingPolicy, topology: Topology) -> ModelUnits:
    each = nominal_depths(args, _both_halves(args), topology.pp)
    shape = dataclasses.replace(
        model,
        layers=sum(each) or 1,
        vocab_multiple=1,
        tied=not args.untie_embeddings_and_output_weights,
        bias=bool(args.add_bias_linear),
        moe_layer_freq=_by_stages(model, args, each),
    )
    if shape.experts is not None:
        sizes = {"ep": args.expert_model_parallel_size, "etp": args.expert_tensor_parallel_size}
        require_expert_layout(Parallel(tp=topology.tp, **sizes), shape)
    units = transformer_units(
        shape,
        tp=topology.tp,
        pp=topology.pp,
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size,
        granule=policy.granule,
        depths=each,
    )
    if shape.experts is not None:
        require_experts_in_all_stages(units)
    return units


def _by_stages(model: Model, args: Any, each: Sequence[int]) -> str:
    """Return which layers have experts, stage by stage: an interleaved pipeline has them in another order. A layer of
    multi-token prediction is as the last layer."""
    if model.experts is None:
        return model.moe_layer_freq
    chunks = args.virtual_pipeline_model_parallel_size or 1
    stages = stage_layers(args)
    found: list[list[bool]] = [[] for _ in each]
    left = list(model.expert_layers)
    for chunk in range(chunks):
        for stage, depth in enumerate(each):
            some = depth // chunks + (depth % chunks if chunk == chunks - 1 else 0)
            if stages is not None:
                some = sum(kind in ("decoder", "mtp") for kind in stages[stage][chunk])
            found[stage] += (left[:some] + left[-1:] * some)[:some]
            left = left[some:] or left[-1:]
    return str([int(layer) for stage in found for layer in stage])


def _both_halves(args: Any) -> int:
    """Return the layers of attention and MLP; in a hybrid model each is a layer of its own."""
    if not args.hybrid_layer_pattern:
        return int(args.num_layers)
    pattern: str = args.hybrid_layer_pattern
    return max(1, pattern.count("*") + pattern.count("+"), pattern.count("-"))


def _copies(topology: Topology, args: Any, policy: TrainingPolicy) -> CopyPolicy | None:
    """Return how the job copies what its ranks hold, or None if it does not."""
    are_made = makes_copies(policy.copies, topology, sharded=bool(args.use_distributed_optimizer))
    return policy.copies if are_made else None


def _copied(args: Any) -> int:
    """Return the bytes of a copy for one parameter: what is stepped in float32, and the optimizer's moments."""
    moments = 2 if args.optimizer != "sgd" else int(args.sgd_momentum > 0)
    return _MAIN_BYTES + moments * _MOMENT_BYTES


def _layout_alone(nominal: Nominal) -> Nominal:
    """Return the job without copies and limits of memory, which are checked by themselves."""
    policy = dataclasses.replace(nominal.policy, copies=CopyPolicy(count=0))
    return dataclasses.replace(nominal, policy=policy, guard=None)


# ---------------------------------------------------------------- notes


def _notes(unknown: Sequence[str], ranks: StartedRanks, topology: Topology, *, enabled: bool) -> Iterator[str]:
    if untested := warning("megatron"):
        yield untested
    if not enabled:
        yield f"{ENABLE} is not among the flags; this is what the job would be with it"
    if ranks.size is None:
        yield f"{topology.size} processes are assumed; --world-size, or --nnodes and --nproc-per-node, says how many"
    flags = [word for word in unknown if word.startswith("-")]
    if flags:
        yield f"not flags of Megatron, so taken for the script's own: {', '.join(flags)}"


def _notes_of_model(args: Any) -> Iterator[str]:
    if getattr(args, "experimental_attention_variant", None):
        yield "memory counts attention in the place of each gated delta net"
    if args.mtp_num_layers:
        yield "memory is without the projections of multi-token prediction, and without its copy of the embedding"


def _notes_of_accepted(nominal: Nominal, policy: TrainingPolicy, *, knows_vocabulary: bool) -> Iterator[str]:
    width = nominal.policy.min_tp_width
    if width > policy.min_tp_width:
        yield f"a replica with a stage of fewer than {width} slots does not train"
    if not knows_vocabulary:
        yield "the vocabulary is in the tokenizer's files, so memory is without the embedding and the output layer"
