"""Which unsupported options a Megatron job has (`unsupported.py`), and the error that names them all. PURE."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ntp_plugin.config.sections import TrainingPolicy
from ntp_plugin.errors import Refused
from ntp_plugin.megatron.layout import Layout, lost_stages
from ntp_plugin.megatron.refusals import Refusal, above, given
from ntp_plugin.megatron.unsupported import (
    ALL_MASKS_EXACT,
    EXACT_MASKS,
    LIVE,
    MEMORY_LIMIT,
    MOVED,
    PLANNED,
    TABLE,
    is_fp8,
)
from ntp_plugin.planning.job_check import UnsupportedOption
from ntp_plugin.planning.units import default_granule

_DROPOUTS = ("hidden_dropout", "attention_dropout")


def draws_exact_masks(args: Any, policy: TrainingPolicy) -> bool:
    """Whether the job has dropouts, and the plugin draws their masks."""
    if not (policy.enabled and any(above(name, 0)(args) for name in _DROPOUTS)):
        return False
    return policy.dropout == "exact" or (policy.dropout == "auto" and not list(_no_exact_masks(args)))


def refuse_what_does_not_work(args: Any, policy: TrainingPolicy, layout: Layout) -> None:
    """Raise for all arguments that a degraded layout, or exact masks, do not support."""
    found, cause = list[UnsupportedOption](), "--ntp-dropout exact"
    if layout.lost:
        cause = f"{', '.join(map(str, sorted(layout.lost)))} lost"
        _refuse_narrow(policy, layout)
        found += [*_applying((*TABLE, *PLANNED), args), *_other_masks(args, policy), *_too_few_processes(args, layout)]
        found += [*_batch(policy), *_broken_groups(args, layout.topology.tp), *_unaligned(args, policy)]
        found += [*_limited(args, policy), *_cut_matrices(args, policy)]
        found += _moved_layers(args, policy, layout)
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
    found += _cut_matrices(args, policy)
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


def _moved_layers(args: Any, policy: TrainingPolicy, layout: Layout) -> Iterator[UnsupportedOption]:
    """Refuse what does not work if a replica has lost a stage, so that its layers are on its other stages."""
    lost = lost_stages(layout)
    if not lost:
        return
    topology, of_replicas = layout.topology, Counter(replica for replica, _ in lost)
    yield from _applying(MOVED, args)
    if not args.untie_embeddings_and_output_weights and topology.pp - 1 in of_replicas.values():
        yield UnsupportedOption(
            flag="--untie-embeddings-and-output-weights",
            why="is needed where a replica has one stage left: the embedding would be in it once, and in others twice",
            fix="leave that replica out, or --untie-embeddings-and-output-weights",
        )
    if len(of_replicas) == topology.dp and not getattr(args, "load", None):
        yield UnsupportedOption(
            flag="--ntp-lost",
            why="names a stage of each replica: weights are drawn stage by stage, so none would draw them as nominally",
            fix="start one replica with all stages, or --load a checkpoint",
        )
    if policy.gpu_memory_gb is not None:
        yield UnsupportedOption(
            flag="--ntp-gpu-memory-gb",
            why="is not compared yet with what moved layers need",
            fix="leave it out, or leave that replica out",
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


def _cut_matrices(args: Any, policy: TrainingPolicy) -> Iterator[UnsupportedOption]:
    """Refuse an optimizer of whole matrices where a loss could narrow a replica, or where one rank alone has its
    state."""
    if args.optimizer != "muon":
        return
    if getattr(args, "use_distributed_optimizer", False):
        yield UnsupportedOption(
            flag="--optimizer muon with --use-distributed-optimizer",
            why="is not built yet: one rank alone keeps what Muon has of a matrix",
            fix="leave --use-distributed-optimizer out: each rank then keeps it for all matrices",
        )
    tp = args.tensor_model_parallel_size
    never_narrower = given("num_experts")(args) or above("context_parallel_size")(args) or policy.min_tp_width == tp
    if tp > 1 and not never_narrower:
        yield UnsupportedOption(
            flag="--optimizer muon",
            why="steps whole matrices, and a narrower replica would have other ones",
            fix=f"--ntp-min-tp-width {tp}, --tensor-model-parallel-size 1, or --optimizer adam",
        )
    if tp > 1 and getattr(args, "muon_tp_mode", "blockwise") != "blockwise":
        yield UnsupportedOption(
            flag="--muon-tp-mode",
            why="other than blockwise steps matrices that several slots have parts of, and nobody has tried it",
            fix="--muon-tp-mode blockwise",
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
        if 0 < width < policy.min_tp_width:
            raise Refused(
                f"replica {replica} is {width} slots wide in stage {stage}, "
                f"below --ntp-min-tp-width {policy.min_tp_width}",
                fix="lower it, or leave the replica out",
            )
