"""Options that the plugin does not support in a DeepSpeed job, refused when the engine is built."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.utils.bwc import bwc_pipeline_parallel_world_size, bwc_tensor_model_parallel_world_size

from ntp_plugin.config.sections import ActionsPolicy, TrainingPolicy
from ntp_plugin.errors import ConfigError, Refused
from ntp_plugin.planning.job_check import UnsupportedOption

type _Reason = tuple[str, str, bool]
"""A key, what it does, and whether the configuration has it."""

_FUSED_ADAM = ("deepspeed.ops.adam.fused_adam", "FusedAdam")
_OTHER_THAN_ADAGRAD = "another optimizer, or ZeRO stage 0"
MADE_ANEW = "is made anew within ZeRO, by DeepSpeed, and the engine keeps one that steps nothing"
_WHAT_WORKS = "train with ZeRO, data parallel, with AutoTP (stages 0 to 2) or with an mpu's tensor parallelism"


def refuse_configuration(engine: Any, config: Any, policy: TrainingPolicy, *, model: Any, mpu: Any) -> None:
    """Raise `Refused` with all unsupported options of a configuration, before anything is built."""
    raw = config._param_dict
    cuts = raw.get("tensor_parallel", {}).get("autotp_size", 0) > 1
    refuse_lost(policy)
    if type(engine) is not DeepSpeedEngine:
        raise Refused(f"{type(engine).__name__} cannot go on after a loss", fix=_WHAT_WORKS)
    refuse_all(
        [
            *unsupported_keys(raw, config.zero_config),
            *_unsupported_mpu(mpu, config.zero_config, cuts=cuts),
            *_of_lightning(model),
            *unsupported_ntp_keys(policy, cuts=cuts, mpu=mpu is not None),
        ]
    )
    if mpu is not None:
        refuse_one_replica(bwc_tensor_model_parallel_world_size(mpu), dist.get_world_size())


def _of_lightning(model: Any) -> Iterator[UnsupportedOption]:
    trainer = getattr(model, "_trainer", None)
    if type(trainer).__module__.partition(".")[0] in ("lightning", "pytorch_lightning"):
        yield UnsupportedOption(
            flag="Lightning's Trainer",
            why="ends a data epoch after as many batches as its loader had at the start, and counts a batch before it"
            " is trained; after a loss a rank has more batches, and trains some of them again. Lightning would have to"
            " ask how many batches each step has, and to count a step when it is over",
            fix="a loop of your own, with Accelerate or without, or Hugging Face's Trainer",
        )


def refuse_all(found: Sequence[UnsupportedOption]) -> None:
    """Raise one `Refused` for all of these options, if there are any."""
    if len(found) == 1:
        raise Refused(str(found[0]), fix=found[0].fix)
    if found:
        fixes = dict.fromkeys(option.fix for option in found)
        raise Refused(
            f"{len(found)} options are not supported: {'; '.join(map(str, found))}",
            fix="; ".join(fixes),
        )


def refuse_loop(found: Iterable[tuple[str, str]], *, loop: str) -> None:
    """Raise one `Refused` for all that a framework's loop cannot have.

    Args:
        found: What it has, and what to do.
        loop: What kind of loop it is.
    """
    options = list(found)
    if options:
        what = "; ".join(option for option, _ in options)
        fixes = dict.fromkeys(fix for _, fix in options)
        raise Refused(f"{what}, and {loop} cannot go on after a loss", fix="; ".join(fixes))


@contextlib.contextmanager
def adapters_are_named(engine: Any, config: Any) -> Iterator[None]:
    """Raise `Refused` where DeepSpeed cannot build an engine with AutoTP, ZeRO and parameters that are not trained."""
    try:
        yield
    except (KeyError, IndexError) as error:
        cuts = config._param_dict.get("tensor_parallel", {}).get("autotp_size", 0) > 1
        module = getattr(engine, "module", None)
        if not cuts or not int(config.zero_config.stage) or module is None:
            raise
        frozen = sum(not parameter.requires_grad for parameter in module.parameters())
        if not frozen:
            raise
        raise Refused(
            f"DeepSpeed cannot build ZeRO over a model that AutoTP has cut and that has {frozen} parameters which are"
            f" not trained ({type(error).__name__}, also without ntp): AutoTP has replaced some that the optimizer got,"
            " as with adapters (LoRA)",
            fix="leave tensor_parallel.autotp_size out, or the adapters",
        ) from error


def refuse_lost(policy: TrainingPolicy) -> None:
    """Raise if the job is to begin without some of its slots."""
    if policy.lost:
        raise ConfigError(
            "ntp.lost names slots that are missing from the start, and a DeepSpeed job cannot begin without them",
            fix="start with all slots; the job goes on without those that are lost later",
        )


def unsupported_keys(raw: Mapping[str, Any], zero: Any) -> Iterator[UnsupportedOption]:
    """Yield what a job cannot have of DeepSpeed's own keys.

    Args:
        raw: The configuration.
        zero: Its `zero_optimization` as DeepSpeed reads it.
    """
    cuts = raw.get("tensor_parallel", {}).get("autotp_size", 0) > 1
    of_zero = (_of_zero(zero), _of_stage_3(raw, zero, cuts=cuts), _of_offloading(zero))
    for found in (*of_zero, _of_autotp(raw, zero), _of_the_loop(raw), _of_the_engine(raw)):
        yield from (_cannot_go_on(flag, why) for flag, why, is_so in found if is_so)


def _of_zero(zero: Any) -> Iterator[_Reason]:
    yield (
        "zero_optimization.zenflow",
        "applies gradients of one step in later ones, from the host's memory, where they are not copied",
        zero.zenflow is not None,
    )


def _of_autotp(raw: Mapping[str, Any], zero: Any) -> Iterator[_Reason]:
    cuts = raw.get("tensor_parallel", {}).get("autotp_size", 0) > 1
    yield (
        "tensor_parallel.autotp_size > 1 with ZeRO and torch_autocast",
        "reduces gradients in several dtypes",
        cuts and int(zero.stage) > 0 and bool(raw.get("torch_autocast", {}).get("enabled")),
    )


def _of_the_loop(raw: Mapping[str, Any]) -> Iterator[_Reason]:
    yield (
        "managed_gradient_accumulation = false",
        "has the loop decide after which micro-batch a step is taken, so that a rank cannot get those of a lost one",
        raw.get("managed_gradient_accumulation", True) is False,
    )
    sampling = raw.get("data_efficiency", {}).get("data_sampling", {})
    yield (
        "data_efficiency.data_sampling",
        "draws its samples by itself, so that nobody knows what a lost rank would have drawn",
        bool(sampling.get("enabled") or sampling.get("curriculum_learning", {}).get("enabled")),
    )


def _of_the_engine(raw: Mapping[str, Any]) -> Iterator[_Reason]:
    yield (
        "sequence_parallel_size > 1",
        "has several ranks compute one sample, none of which can do so alone",
        raw.get("sequence_parallel_size", 1) > 1,
    )
    yield (
        "compile.deepcompile",
        "puts collectives into the compiled graph, where a loss cannot interrupt them",
        bool(raw.get("compile", {}).get("deepcompile")),
    )
    yield "expert_parallel", "spreads experts over ranks", bool(raw.get("expert_parallel", {}).get("enabled"))
    yield "hybrid_engine", "also generates with its weights", bool(raw.get("hybrid_engine", {}).get("enabled"))
    yield (
        "checkpoint.writer",
        "plans once which ranks write which part of a file, and a lost rank's part would be missing",
        bool(raw.get("checkpoint", {}).get("writer")),
    )
    yield (
        "datastates_ckpt",
        "writes a checkpoint while the next steps are taken, and a lost rank's file would be missing",
        raw.get("datastates_ckpt", False) is not False,
    )


def _of_stage_3(raw: Mapping[str, Any], zero: Any, *, cuts: bool) -> Iterator[_Reason]:
    if int(zero.stage) < 3:
        return
    block, needs_cuda = "zero_optimization", "calls kernels that exist for CUDA alone, and has not been run"
    yield "tensor_parallel.autotp_size > 1 with ZeRO-3", "shards parts that a loss cuts anew", cuts
    yield (
        "gradient_predivide_factor with ZeRO-3",
        "is not multiplied back by DeepSpeed where it equals the number of ranks, which a loss changes",
        raw.get("gradient_predivide_factor", 1.0) != 1.0,
    )
    yield f"{block}.zero_quantized_weights", needs_cuda, bool(zero.zero_quantized_weights)
    yield f"{block}.zero_quantized_nontrainable_weights", needs_cuda, bool(zero.zero_quantized_nontrainable_weights)
    yield f"{block}.zero_quantized_gradients", needs_cuda, bool(zero.zero_quantized_gradients)


def _of_offloading(zero: Any) -> Iterator[_Reason]:
    """State in a host's memory is copied from there."""
    on_disk = "keeps state on a disk, where it is not copied"
    for name in ("offload_optimizer", "offload_param"):
        offload = getattr(zero, name)
        is_on_disk = offload is not None and offload.device == OffloadDeviceEnum.nvme
        yield f"zero_optimization.{name}.device = nvme", on_disk, is_on_disk
    optimizer = zero.offload_optimizer
    ratio = optimizer is not None and optimizer.ratio < 1
    yield "zero_optimization.offload_optimizer.ratio < 1", "steps a part by another optimizer, before the vote", ratio
    super_offload = optimizer is not None and bool(getattr(optimizer, "super_offload", False))
    yield "zero_optimization.offload_optimizer.super_offload", "steps in a process of its own", super_offload


def _unsupported_mpu(mpu: Any, zero: Any, *, cuts: bool) -> Iterator[UnsupportedOption]:
    found = (
        ("an mpu", "beside tensor_parallel.autotp_size > 1 cuts replicas twice", cuts and mpu is not None),
        ("an mpu with stages of a pipeline", "is not built", bwc_pipeline_parallel_world_size(mpu) > 1),
        (
            "zero_optimization.zero_hpz_partition_size > 1 with an mpu's tensor parallelism",
            "has second slices of consecutive ranks, which are not those of one replica",
            mpu is not None and int(zero.zero_hpz_partition_size) > 1 and bwc_tensor_model_parallel_world_size(mpu) > 1,
        ),
        ("an mpu with sequence parallelism of its own", "is not built", _sequence_parallel_size(mpu) > 1),
        (
            "an mpu without get_data_parallel_group",
            "does not say which ranks are replicas",
            mpu is not None and not hasattr(mpu, "get_data_parallel_group"),
        ),
    )
    yield from (_cannot_go_on(flag, why) for flag, why, is_so in found if is_so)


def _cannot_go_on(flag: str, why: str) -> UnsupportedOption:
    return UnsupportedOption(flag=flag, why=f"{why}, and such a job cannot go on after a loss", fix=_WHAT_WORKS)


def _sequence_parallel_size(mpu: Any) -> int:
    return int(mpu.get_sequence_parallel_world_size()) if hasattr(mpu, "get_sequence_parallel_world_size") else 1


def refuse_one_replica(tp: int, ranks: int) -> None:
    """Raise if an mpu's only replica could not go on without one of its slots."""
    if 1 < tp == ranks:
        raise Refused(
            f"the mpu has all {ranks} ranks in one replica, and one that has lost a slot cannot be cut anew",
            fix=f"start {2 * tp} processes or more, or have AutoTP cut the model",
        )


def unsupported_ntp_keys(policy: TrainingPolicy, *, cuts: bool, mpu: bool) -> Iterator[UnsupportedOption]:
    """Yield keys of the `ntp` block that would have no effect; `cuts`: with AutoTP, `mpu`: with an mpu."""
    exact = policy.dropout == "exact"
    found = (
        (
            f"batch.mode = {policy.batch.mode}",
            "leaves samples out, and the loop's loader would not know which",
            policy.batch.mode != "strict",
        ),
        ("dropout = exact", "cannot hold within a layer that AutoTP has cut: masks follow its width", cuts and exact),
        (
            "dropout = exact",
            "cannot hold with an mpu, whose layers draw their masks by rules of their own",
            mpu and exact,
        ),
        (
            "min_tp_width > 1",
            "needs idle replicas, which are not built for DeepSpeed",
            cuts and policy.min_tp_width > 1,
        ),
        ("route = via_core", "has no effect: gradients go lane by lane here", policy.route == "via_core"),
        (
            "gpu_memory_gb",
            "has no effect: micro-batches have one size here, and no replica is left out for its memory",
            policy.gpu_memory_gb is not None,
        ),
        (
            "actions",
            "has no effect: a DeepSpeed job does not choose what to do about a loss",
            policy.actions != ActionsPolicy(),
        ),
    )
    for key, why, is_so in found:
        if is_so:
            yield UnsupportedOption(flag=f"ntp.{key}", why=why, fix=f"leave ntp.{key.split()[0]} out")


def refuse_engine(engine: Any) -> None:
    """Raise for an engine that cannot go on after a loss, when it is built."""
    if engine.basic_optimizer is None:
        raise Refused("there is no optimizer to keep through a loss", fix="name one, or leave ntp out")
    if engine.zero_optimization_stage() and engine.optimizer.optimizer is not engine.basic_optimizer:
        raise Refused(f"the optimizer {type(engine.basic_optimizer).__name__} {MADE_ANEW}", fix=_OTHER_THAN_ADAGRAD)
    if engine.has_moe_layers:
        raise Refused("layers of experts are not held alike by all ranks", fix=_WHAT_WORKS)
    if engine.autotp_size() > 1 and type(engine.optimizer).__name__ == "FP16_Optimizer":
        raise Refused(
            "DeepSpeed's FusedAdam in half precision, without ZeRO, flattens what AutoTP has cut (FP16_Optimizer)",
            fix='"torch_adam": true in optimizer.params, or ZeRO stage 1 or 2',
        )
    if engine.autotp_size() > 1 and not engine.zero_optimization_stage() and rounds_by_place(engine.basic_optimizer):
        raise Refused(
            "DeepSpeed's FusedAdam on a CPU rounds an element by its place in memory, so that replicas of different"
            " width would differ",
            fix='"torch_adam": true in optimizer.params, or ZeRO',
        )
    of_model, accumulated = engine.get_data_types()
    if engine.autotp_size() > 1 and of_model != accumulated:
        raise Refused(
            f"gradients of {of_model} are accumulated in {accumulated}, which is not built where AutoTP has cut the"
            " model",
            fix="leave data_types.grad_accum_dtype out",
        )


def rounds_by_place(optimizer: Any) -> bool:
    """Whether the optimizer rounds an element by its place: DeepSpeed's CPU Adam computes blocks of sixteen elements
    and the rest otherwise."""
    on_cpu = all(parameter.device.type == "cpu" for group in optimizer.param_groups for parameter in group["params"])
    return on_cpu and (type(optimizer).__module__, type(optimizer).__name__) == _FUSED_ADAM


CALLS = {
    "set_train_batch_size": "samples are counted in steps of one size",
    "set_train_micro_batch_size": "samples are counted in steps of one size",
    "no_sync": "gradients are reduced where the step wants it",
    "coalesce_grad_reduction": "gradients are reduced where the step wants it",
}
"""Methods of the engine that a loop may not call, and why."""


def refuse_load(original: Any, *, degraded: Callable[[], bool]) -> Callable[..., Any]:
    """Replace `load_checkpoint`, if a replica has several slots."""

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        if degraded():
            raise Refused(
                "engine.load_checkpoint() while a rank is lost: the files hold other parts than its replica has now",
                fix="load it before the training, or once all ranks are back",
            )
        return original(*args, **kwargs)

    return load


def refuse_call(name: str) -> Callable[..., Any]:
    """Replace a method of `CALLS` by one that raises `Refused`."""

    def refused(*_: Any, **__: Any) -> Any:
        raise Refused(
            f"engine.{name}() in a job that is to survive its ranks: {CALLS[name]}",
            fix="set it in the configuration (train_batch_size, gradient_accumulation_steps), or leave ntp out",
        )

    return refused
