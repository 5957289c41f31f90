"""What does not work in a hurt layout, and is refused at start: by its flag, with the way out.

A line here is a promise that nothing is computed wrongly in silence. Whoever builds a feature takes its line out.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from ntp_plugin.config.sections import TrainingPolicy
from ntp_plugin.errors import Refused
from ntp_plugin.megatron.layout import Layout


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """One thing that is refused: when, and what to do instead."""

    flag: str
    applies: Callable[[Any], object]
    why: str
    way_out: str


def _above(name: str, bound: float = 1) -> Callable[[Any], bool]:
    return lambda args: (getattr(args, name, None) or 0) > bound


def _given(name: str) -> Callable[[Any], object]:
    return lambda args: getattr(args, name, None)


def _not_built(flag: str, applies: Callable[[Any], object] | None = None, *, way_out: str = "") -> Refusal:
    """Something that could work, and is not built yet."""
    return Refusal(
        flag=flag,
        applies=applies or _given(flag.removeprefix("--").replace("-", "_")),
        why="is not built yet for replicas of different width",
        way_out=way_out or f"leave {flag} out, or start with whole replicas",
    )


TABLE: tuple[Refusal, ...] = (
    _not_built("--context-parallel-size", _above("context_parallel_size")),
    _not_built("--expert-model-parallel-size", _above("expert_model_parallel_size")),
    _not_built("--num-experts"),
    _not_built("--pipeline-model-parallel-layout"),
    _not_built("--pipeline-model-parallel-comm-backend"),
    _not_built("--use-ring-exchange-p2p"),
    _not_built("--defer-embedding-wgrad-compute"),
    _not_built("--sequence-parallel"),
    _not_built(
        "--sequence-parallel",
        lambda args: getattr(args, "sequence_parallel", False) and args.pipeline_model_parallel_size > 1,
        way_out="leave --sequence-parallel out: with a pipeline, a stage would need rows of several slots of another",
    ),
    _not_built("--overlap-param-gather"),
    _not_built("--use-torch-fsdp2"),
    _not_built("--use-megatron-fsdp"),
    _not_built("--multi-latent-attention"),
    _not_built("--mtp-num-layers"),
    _not_built("--fp16"),
    _not_built("--fp8-format", _given("fp8")),
    _not_built("--fp4-format", _given("fp4")),
    _not_built("--hidden-dropout", _above("hidden_dropout", 0), way_out="--hidden-dropout 0"),
    _not_built("--attention-dropout", _above("attention_dropout", 0), way_out="--attention-dropout 0"),
    _not_built("--save", way_out="leave it out: a checkpoint of uneven shards would be written with wrong offsets"),
    _not_built("--load", way_out="leave it out: a checkpoint would be read into uneven shards with wrong offsets"),
    _not_built("--pretrained-checkpoint"),
    _not_built("--use-checkpoint-args"),
    _not_built("--yaml-cfg"),
    _not_built("--heterogeneous-layers-config-path"),
    _not_built("--perform-rl-step"),
    _not_built("--tp-comm-overlap"),
    _not_built("--use-tp-pp-dp-mapping"),
    _not_built("--qk-clip"),
    _not_built("--sft"),
    _not_built("--init-model-with-meta-device"),
    _not_built("--ddp-average-in-collective"),
    _not_built("--use-precision-aware-optimizer"),
    _not_built("--optimizer-cpu-offload"),
    _not_built("--log-num-zeros-in-grad"),
    _not_built("--check-weight-hash-across-dp-replicas-interval"),
    _not_built("--step-batch-size-schedule"),
    _not_built("--decrease-batch-size-if-needed"),
    _not_built("--num-distributed-optimizer-instances", _above("num_distributed_optimizer_instances")),
    _not_built("--tensor-parallel-num-weight-shards", lambda args: args.tensor_parallel_num_weight_shards),
    _not_built("--cuda-graph-impl", lambda args: getattr(args, "cuda_graph_impl", "none") != "none"),
    _not_built("--experimental-attention-variant"),
    Refusal(
        flag="--transformer-impl",
        applies=lambda args: args.transformer_impl != "local",
        why="has layers that draw their weights by themselves, and whose uneven shards nobody has tried",
        way_out="--transformer-impl local",
    ),
    Refusal(
        flag="--use-cpu-initialization",
        applies=lambda args: not args.use_cpu_initialization,
        why="is needed: drawn on GPUs, the weights of a lost slot are known to nobody",
        way_out="--use-cpu-initialization",
    ),
    Refusal(
        flag="--data-parallel-random-init",
        applies=_given("data_parallel_random_init"),
        why="sends weights from replica to replica in the order of their bytes, which differs with the width",
        way_out="leave it out: all replicas draw the same weights",
    ),
    Refusal(
        flag="--dataloader-type",
        applies=lambda args: args.dataloader_type not in (None, "single"),
        why="shares samples out by itself, and evenly",
        way_out="--dataloader-type single",
    ),
    Refusal(
        flag="--optimizer",
        applies=lambda args: args.optimizer != "adam",
        why="is not element-wise, or nobody has tried it: units of one matrix would depend on where they are",
        way_out="--optimizer adam",
    ),
)


def refuse_what_does_not_work(args: Any, policy: TrainingPolicy, layout: Layout) -> None:
    """Raise for the first thing in the arguments that a hurt layout cannot have."""
    _refuse_policy(policy, layout)
    hurt = f"{', '.join(map(str, sorted(layout.lost)))} lost"
    for refusal in TABLE:
        if refusal.applies(args):
            raise Refused(f"with {hurt}, {refusal.flag} {refusal.why}", way_out=refusal.way_out)
    tp = layout.topology.tp
    if getattr(args, "use_distributed_optimizer", False) and len(layout.slots) < tp * layout.topology.pp:
        raise Refused(
            f"with {hurt}, --use-distributed-optimizer has {len(layout.slots)} processes, fewer than a whole replica: "
            "Megatron's report on memory divides by how many replicas they make",
            way_out="leave --use-distributed-optimizer out",
        )
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    if groups % tp:
        raise Refused(
            f"--num-query-groups: {groups} query groups do not divide over {tp} TP slots",
            way_out=f"a query group stays whole: choose a --tensor-model-parallel-size that divides {groups}",
        )


def _refuse_policy(policy: TrainingPolicy, layout: Layout) -> None:
    if policy.route == "via_core":
        raise Refused(
            "--ntp-route via_core is not built yet on Megatron", way_out="--ntp-route direct, or leave it out"
        )
    if policy.batch.mode != "strict":
        raise Refused(
            f"--ntp-batch-mode {policy.batch.mode} is not built yet on Megatron",
            way_out="leave it out: strict computes every sample of the global batch",
        )
    for (replica, stage), pattern in layout.standing.patterns.items():
        width = layout.topology.tp - len(pattern)
        if width < policy.min_tp_width:
            raise Refused(
                f"replica {replica} is {width} slots wide in stage {stage}, "
                f"below --ntp-min-tp-width {policy.min_tp_width}",
                way_out="lower it, or leave the whole replica out",
            )
