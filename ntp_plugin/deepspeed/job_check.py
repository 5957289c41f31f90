"""What `ntp check` finds out about a DeepSpeed configuration, without an engine, a model or other ranks.

Keys are refused by the functions that refuse them when an engine is built (`unsupported.py`). What only the built
engine shows is in the notes. Losses are planned on units of a stand-in, since nobody knows the model: one family, of as
many parameters as the user says.
"""

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig, DeepSpeedConfigError

from ntp_plugin.config.sections import Batch, CopyPolicy, Hardware, Parallel, State, TrainingPolicy
from ntp_plugin.deepspeed.auto_values import fill
from ntp_plugin.deepspeed.settings import read_policy
from ntp_plugin.deepspeed.unsupported import (
    MADE_ANEW,
    refuse_lost,
    refuse_one_replica,
    unsupported_keys,
    unsupported_ntp_keys,
)
from ntp_plugin.errors import BelowMinimum, ConfigError, Refused, StateLost
from ntp_plugin.planning.job_check import (
    ChangedOption,
    CheckedJob,
    JobCheck,
    StartedRanks,
    UnsupportedOption,
    examined,
    refused,
)
from ntp_plugin.planning.recovery_plan import Nominal
from ntp_plugin.planning.survival import Survival
from ntp_plugin.planning.topology import Topology
from ntp_plugin.planning.units import Family, ModelUnits, Run, StageUnits, Tensor
from ntp_plugin.tested_versions.comparison import refusal, warning

_USUAL_HOST = 8
_UNITS_PER_SLOT = 64
_UNKNOWN_PARAMETERS = 1_000_000
_MAIN_BYTES, _MOMENT_BYTES = 4, 4
_MICRO, _ACCUMULATION, _TOTAL = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
)
_ACCELERATE = (
    "a loop with Accelerate survives lost ranks unedited; the job refuses a training loader with dispatch_batches,"
    " split_batches, even_batches = False, an iterable data set or skip_first_batches"
)
_NOT_READABLE = (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError, ZeroDivisionError)
"""What DeepSpeed raises for a value that it does not expect."""
_UNREAD, _NO_OPTIMIZER = "DeepSpeed cannot read the configuration", "neither DeepSpeed nor torch has an optimizer"
BY_DEEPSPEED = (_UNREAD, _NO_OPTIMIZER)
"""How the errors begin where DeepSpeed itself refuses a configuration."""
_ELEMENT_WISE, _STEP_MATRICES, _MADE_ANEW = ("adam", "adamw", "sgd", "rmsprop", "lion"), ("lamb", "muon"), "adagrad"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineShape:
    """What the configuration says about the engine."""

    stage: int
    autotp: int
    """The width of replicas that AutoTP cuts; 1 without AutoTP."""
    mpu: int
    """The width of replicas of the script's own mpu; 1 without one."""
    micro_batch: int
    accumulation: int
    half: bool
    optimizer: str
    torch_adam: bool

    @property
    def tp(self) -> int:
        return max(self.autotp, self.mpu)

    @property
    def samples(self) -> int:
        """Samples of a step for each loader."""
        return self.micro_batch * self.accumulation


def check_job(
    raw: Mapping[str, Any], ranks: StartedRanks, *, tp: int, parameters: int | None, trainer: str | None = None
) -> JobCheck:
    """Check a configuration; without `"enabled": true` it is checked as if it had that.

    Args:
        raw: The content of the `ds_config.json`.
        ranks: The processes that `ntp run` would start.
        tp: The tensor-parallel degree of the script's mpu; 1 without an mpu.
        parameters: Parameters of the model, if known.
        trainer: Who fills in values that are "auto" (`auto_values.TRAINERS`); None: the HF Trainer, if there are any.

    Raises:
        ConfigError: A value is wrong, or values do not fit together or the processes, or DeepSpeed refuses the
            configuration.
    """
    policy = read_policy(raw)
    refuse_lost(policy)
    filled = fill(raw, trainer=trainer, size=ranks.size)
    raw = filled.config
    size, shape, unsupported = _read(raw, policy, ranks, tp=tp)
    if trainer == "accelerate":
        unsupported = (*unsupported, *_unsupported_with_accelerate(shape))
    topology = _topology(shape, policy, size, ranks)
    check = JobCheck(
        framework="deepspeed",
        unsupported=unsupported,
        topology=topology,
        notes=(
            *_notes(raw, shape, ranks, topology, policy, parameters=parameters),
            *filled.notes,
            *([_ACCELERATE] if trainer == "accelerate" else []),
        ),
    )
    check = _with_one_replica(check, shape)
    if (error := refusal("deepspeed")) is not None:
        check = refused(check, error, flag="the installed version")
    return check if check.unsupported else _examined(check, shape, policy, parameters)


def _read(
    raw: Mapping[str, Any], policy: TrainingPolicy, ranks: StartedRanks, *, tp: int
) -> tuple[int, EngineShape, tuple[UnsupportedOption, ...]]:
    """Return the number of processes, and what the configuration says and asks for that is unsupported.

    It has not been checked by anybody: a value of another type than DeepSpeed expects is an error of the user.
    """
    try:
        size = ranks.size or _assumed_size(raw, tp)
        zero, shape = _as_deepspeed_reads_it(raw, tp=tp, size=size)
        return size, shape, tuple(_unsupported(raw, zero, policy, shape))
    except ConfigError:
        raise
    except (*_NOT_READABLE, DeepSpeedConfigError) as error:
        raise ConfigError(f"{_UNREAD}: {' '.join(str(error).split())}") from None


def _as_deepspeed_reads_it(raw: Mapping[str, Any], *, tp: int, size: int) -> tuple[Any, EngineShape]:
    """Have DeepSpeed read the configuration, as of a job of one process: here are no others."""
    shape, alone = _shape(raw, tp=tp, size=size), copy.deepcopy(dict(raw))
    if any(name in raw for name in (_MICRO, _TOTAL)):
        alone |= {_MICRO: shape.micro_batch, _ACCUMULATION: shape.accumulation, _TOTAL: shape.samples}
    zero = DeepSpeedConfig(alone).zero_config
    optimizer = raw.get("optimizer", {}).get("type")
    if optimizer and shape.optimizer not in DEEPSPEED_OPTIMIZERS and not hasattr(torch.optim, optimizer):
        raise ConfigError(
            f"{_NO_OPTIMIZER} {optimizer}",
            fix=f"one of torch.optim, or of DeepSpeed: {', '.join(DEEPSPEED_OPTIMIZERS)}",
        )
    return zero, dataclasses.replace(shape, stage=int(zero.stage))


def _examined(check: JobCheck, shape: EngineShape, policy: TrainingPolicy, parameters: int | None) -> JobCheck:
    check = dataclasses.replace(check, changes=tuple(_changes(shape, policy)))
    has_copies = shape.stage > 0 and policy.copies.mode != "off"
    job = CheckedJob(
        nominal=_nominal(check.topology, shape, policy, parameters or _UNKNOWN_PARAMETERS),
        copies=policy.copies if has_copies else None,
        copied_bytes=_MAIN_BYTES + (1 if shape.optimizer == "sgd" else 2) * _MOMENT_BYTES,
        knows_parameters=parameters is not None,
        knows_gpu_memory=False,
    )
    check = examined(check, job)
    return (
        check if shape.autotp > 1 else dataclasses.replace(check, survivals=tuple(map(_as_state_lost, check.survivals)))
    )


def _as_state_lost(survival: Survival) -> Survival:
    """Return it with the code of a job whose replicas cannot be cut anew: without one that is whole, no rank holds the
    state."""
    code = StateLost.exit_code if survival.exit_code == BelowMinimum.exit_code else survival.exit_code
    return dataclasses.replace(survival, exit_code=code)


# ---------------------------------------------------------------- the configuration


def _shape(raw: Mapping[str, Any], *, tp: int, size: int) -> EngineShape:
    micro, accumulation, total = (raw.get(name) for name in (_MICRO, _ACCUMULATION, _TOTAL))
    loaders = max(1, size // tp)  # AutoTP's slots of a replica are all counted
    if micro is None:
        micro = total // (loaders * (accumulation or 1)) if total else 1
    if accumulation is None:
        accumulation = total // (loaders * micro) if total else 1
    if total is not None and total != micro * accumulation * loaders:
        raise ConfigError(
            f"train_batch_size = {total} is not train_micro_batch_size_per_gpu x gradient_accumulation_steps x"
            f" {'replicas' if tp > 1 else 'processes'} = {micro} x {accumulation} x {loaders}",
            fix="leave one of the three out, or give another --world-size",
        )
    optimizer = raw.get("optimizer", {})
    return EngineShape(
        stage=0,
        autotp=max(1, int(raw.get("tensor_parallel", {}).get("autotp_size", 1))),
        mpu=tp,
        micro_batch=int(micro),
        accumulation=int(accumulation),
        half=any(bool(raw.get(kind, {}).get("enabled")) for kind in ("fp16", "bf16", "bfloat16")),
        optimizer=str(optimizer.get("type", "")).lower(),
        torch_adam=bool(optimizer.get("params", {}).get("torch_adam")),
    )


def _assumed_size(raw: Mapping[str, Any], tp: int) -> int:
    """Return the number of processes that the three sizes of batches imply, else as many replicas as they divide by and
    a host of eight would have of one process each."""
    micro, accumulation, total = (raw.get(name) for name in (_MICRO, _ACCUMULATION, _TOTAL))
    if not total:
        return max(_USUAL_HOST, tp)
    most = int(total // ((micro or 1) * (accumulation or 1))) or 1
    return tp * (most if micro and accumulation else max(size for size in range(1, _USUAL_HOST + 1) if not most % size))


def _unsupported(
    raw: Mapping[str, Any], zero: Any, policy: TrainingPolicy, shape: EngineShape
) -> Iterator[UnsupportedOption]:
    cuts, mpu = shape.autotp > 1, shape.mpu > 1
    yield from unsupported_keys(raw, zero)
    yield from unsupported_ntp_keys(policy, cuts=cuts, mpu=mpu)
    if cuts and mpu:
        yield UnsupportedOption(
            flag="an mpu", why="beside tensor_parallel.autotp_size > 1 is not built", fix="one of the two"
        )
    yield from _unsupported_optimizer(raw, shape)
    yield from _unsupported_precision(raw, shape) if cuts else ()


def _unsupported_with_accelerate(shape: EngineShape) -> Iterator[UnsupportedOption]:
    if shape.autotp > 1 or shape.mpu > 1:
        yield UnsupportedOption(
            flag="tensor_parallel, or an mpu",
            why="gives several ranks the same batches, which a loop with Accelerate cannot draw anew",
            fix="train data parallel with ZeRO",
        )


def _unsupported_optimizer(raw: Mapping[str, Any], shape: EngineShape) -> Iterator[UnsupportedOption]:
    """Yield the optimizer if `training/optimizers.py` refuses it, or the engine would."""
    if not shape.optimizer:
        return
    why, fix = "", "Adam, AdamW, SGD, RMSprop or Lion"
    if shape.optimizer not in (*_ELEMENT_WISE, *_STEP_MATRICES, _MADE_ANEW):
        why = "keeps state that is not known, so it cannot be given to a rank that joins"
    elif shape.optimizer in _STEP_MATRICES and (shape.autotp > 1 or shape.stage):
        why, fix = (
            "steps whole matrices, so its state cannot be cut or sharded anew",
            f"{fix}; or neither ZeRO nor AutoTP",
        )
    elif shape.optimizer == _MADE_ANEW and shape.stage:
        why, fix = MADE_ANEW, f"{fix}; or ZeRO stage 0"
    if why:
        yield UnsupportedOption(flag=f"optimizer.type = {raw['optimizer']['type']}", why=why, fix=fix)


def _unsupported_precision(raw: Mapping[str, Any], shape: EngineShape) -> Iterator[UnsupportedOption]:
    """Yield what `refuse_engine` refuses of the engine where AutoTP has cut the model."""
    if shape.half and not shape.stage and shape.optimizer in ("adam", "adamw") and not shape.torch_adam:
        yield UnsupportedOption(
            flag=f"optimizer.type = {raw['optimizer']['type']}",
            why="in half precision without ZeRO flattens what AutoTP has cut (FP16_Optimizer)",
            fix='"torch_adam": true in optimizer.params, or ZeRO stage 1 or 2',
        )
    accumulated = raw.get("data_types", {}).get("grad_accum_dtype")
    if accumulated is not None and (accumulated in ("fp32", "float32")) == shape.half:
        yield UnsupportedOption(
            flag=f"data_types.grad_accum_dtype = {accumulated}",
            why="is another type than the model's, which is not built where AutoTP has cut the model",
            fix="leave data_types.grad_accum_dtype out",
        )


def _with_one_replica(check: JobCheck, shape: EngineShape) -> JobCheck:
    try:
        refuse_one_replica(shape.mpu, check.topology.size)
        if shape.autotp > 1 and check.topology.dp == 1 and not shape.stage:
            raise Refused(
                "there is one replica, and no ZeRO, whose state is copied: a lost slot takes its part with it",
                fix=f"ZeRO stage 1 or 2, {2 * shape.tp} processes, or a lower tensor_parallel.autotp_size",
            )
    except Refused as error:
        return refused(check, error, flag="the layout")
    return check


def _topology(shape: EngineShape, policy: TrainingPolicy, size: int, ranks: StartedRanks) -> Topology:
    if size % shape.tp:
        raise ConfigError(f"{size} processes do not make replicas of {shape.tp}", fix=f"a multiple of {shape.tp}")
    levels = {"nodes_per_rack": policy.nodes_per_rack, "racks_per_power_row": policy.racks_per_power_row}
    known: dict[str, Any] = {name: value for name, value in levels.items() if value is not None}
    per_host = ranks.per_host or min(size, _USUAL_HOST)
    return Topology.of(Parallel(tp=shape.tp, dp=size // shape.tp, gpus_per_node=per_host, **known))


# ---------------------------------------------------------------- the job as planning sees it


def _nominal(topology: Topology, shape: EngineShape, policy: TrainingPolicy, parameters: int) -> Nominal:
    # Layers of an mpu cannot be cut anew, so a degraded replica leaves.
    narrowest = topology.tp if shape.mpu > 1 else 1
    batch = Batch(micro_batch=shape.micro_batch, global_batch=shape.micro_batch * shape.accumulation * topology.dp)
    return Nominal(
        topology=topology,
        units=_units(topology.tp, parameters),
        batch=batch,
        state=State(distributed_optimizer=shape.stage > 0),
        hardware=Hardware(),
        policy=dataclasses.replace(policy, min_tp_width=narrowest, copies=CopyPolicy(count=0)),
    )


def _units(tp: int, parameters: int) -> ModelUnits:
    rows = _UNITS_PER_SLOT * tp
    family = Family(name="parameters", units=rows)
    tensor = Tensor(
        name="parameters",
        shape=(rows, -(-parameters // rows)),
        family=family.name,
        runs=(Run(start=0, unit_size=1),),
    )
    return ModelUnits(stages=(StageUnits(families=(family,), tensors=((tensor, 1),), flops=(1,)),))


# ---------------------------------------------------------------- what changes, and what is not known


def _changes(shape: EngineShape, policy: TrainingPolicy) -> Iterator[ChangedOption]:
    yield ChangedOption(
        flag="gradient_accumulation_steps",
        change="a rank has more micro-batches, so the loop goes by its loader or by engine.global_steps, and does not"
        " count its own iterations",
    )
    if shape.stage:
        yield ChangedOption(
            flag="zero_optimization.stage",
            change="shards come from copies in memory: engine.global_steps may be one less after a loss, and that step"
            " is taken again" + (". Gradients are reduced once per step" if shape.stage == 2 else ""),
        )
    if shape.stage > 2:
        yield ChangedOption(
            flag="zero_optimization.stage = 3",
            change="a rank whose share is shorter sees its last micro-batch again, and that counts for nothing;"
            " replicas are not compared, since no weight is held twice",
        )
    if shape.autotp > 1:
        checkpoints = "none is written" if shape.stage else "a replica with all its slots writes it"
        yield ChangedOption(
            flag="tensor_parallel.autotp_size",
            change="a degraded replica goes on narrower, and gradients are summed lane by lane. Checkpoints:"
            f" {checkpoints}; engine.load_checkpoint raises",
        )
    if shape.mpu > 1:
        yield ChangedOption(
            flag="mpu", change="a replica that has lost a slot leaves until all its slots have a process"
        )
    if policy.dropout != "exact":
        yield ChangedOption(flag="ntp.dropout", change="other masks where another rank computes a sample")


def _notes(
    raw: Mapping[str, Any],
    shape: EngineShape,
    ranks: StartedRanks,
    topology: Topology,
    policy: TrainingPolicy,
    *,
    parameters: int | None,
) -> Iterator[str]:
    if untested := warning("deepspeed"):
        yield untested
    if not policy.enabled:
        yield '"ntp": {"enabled": true} is not in the configuration; this is what the job would be with it'
    if ranks.size is None:
        yield f"{topology.size} processes are assumed; --world-size, or --nnodes and --nproc-per-node, says how many"
    if parameters is None:
        yield "--parameters N says how large the model is, for the memory of its copies"
    if "optimizer" not in raw:
        yield "an optimizer of the script must be element-wise with ZeRO or AutoTP; the job checks that at its start"
    elif shape.optimizer in ("adam", "adamw") and not shape.torch_adam and shape.autotp > 1 and not shape.stage:
        yield 'on a CPU, DeepSpeed\'s own Adam is refused: "torch_adam": true in optimizer.params'
    yield "layers of experts, pipeline engines and loaders of an unknown kind are refused when the engine is built"
