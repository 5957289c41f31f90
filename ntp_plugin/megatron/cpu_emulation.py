"""CPU emulation: unmodified Megatron on CPU and gloo, so that a recipe can be tried on a laptop.

`NTP_CPU=1` switches it on; without it this module changes nothing. The tables below list everything that is replaced,
each with its reason. Megatron needs a GPU in three ways: it asks CUDA (streams, seeds, memory: the answers do nothing),
it puts tensors on "cuda" (they stay on the CPU), and it compares type names. Only callers in Megatron get
the answer that there is a GPU: torch itself would believe it, and fail.

`NTP_CPU=float64` also turns every tensor that Megatron calls float32 into float64, to measure exactness: an error by
rounding in float32 shrinks by eight more digits, and an error by design does not.

A recipe for GPUs runs as it is: `cpu_arguments.py` changes the arguments that a CPU cannot have, and where they ask for
TransformerEngine, its Python modules run with torch in the place of its kernels (`te_emulation/`).
"""

import collections
import contextlib
import copy
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ntp_plugin.errors import ConfigError
from ntp_plugin.megatron import cpu_fused_gradients
from ntp_plugin.megatron.cpu_arguments import with_cpu_arguments
from ntp_plugin.megatron.delta_net_emulation import DELTA_NET
from ntp_plugin.megatron.te_emulation import importing
from ntp_plugin.megatron.te_emulation.attention_calls import ATTENTION_CALLS
from ntp_plugin.patching import Replacement, apply_all

VARIABLE = "NTP_CPU"
OFF, ON, FLOAT64 = "", "1", "float64"
_CPU = torch.device("cpu")
_GIB = 1 << 30
_SINGLE = torch.float32
"""What torch calls float32, before `DOUBLE` changes its name."""


class _CpuPatches:
    mode = OFF


def wanted(environment: Mapping[str, str] = os.environ) -> str:
    """Return what the variable asks for: `OFF`, `ON` or `FLOAT64`."""
    mode = environment.get(VARIABLE, OFF)
    if mode not in (OFF, "0", ON, FLOAT64):
        raise ConfigError(f"{VARIABLE} = {mode!r} is not known", fix=f"{ON} or {FLOAT64}; leave it out on a GPU")
    return OFF if mode == "0" else mode


def is_installed() -> bool:
    """Whether CPU emulation is on in this process."""
    return _CpuPatches.mode != OFF


def install(mode: str, words: Sequence[str] = ()) -> None:
    """Switch CPU emulation on for the rest of this process, before Megatron is imported; a second call does nothing.

    Args:
        mode: `OFF`, `ON` or `FLOAT64`.
        words: The script's command line. TransformerEngine is emulated if Megatron's arguments ask for it.
    """
    if mode in (OFF, _CpuPatches.mode):
        return
    _CpuPatches.mode = mode
    torch._dynamo.config.disable = True  # Megatron compiles its fusions while it is imported
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron asserts it, for the order of GPU kernels
    apply_all(TORCH)
    cpu_fused_gradients.install()
    if importing.is_wanted(words):
        importing.install()
    if mode == FLOAT64:
        torch.set_default_dtype(torch.float64)
        apply_all(DOUBLE)
    apply_all((*MEGATRON, *(DOUBLE_IN_MEGATRON if mode == FLOAT64 else ())))
    if importing.is_wanted(words):
        apply_all(ATTENTION_CALLS)
    from ntp_plugin.megatron.checkpoint.background_writer import BY_A_THREAD  # noqa: PLC0415  (imports Megatron)

    apply_all(BY_A_THREAD)


# ---------------------------------------------------------------- answers


class _Nothing:
    """A stream or an event that never waits."""

    device = _CPU

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _done(self, *_: Any) -> None:
        pass

    wait_stream = wait_event = wait = record = synchronize = _done

    def record_event(self, event: Any = None) -> Any:
        return event or _Nothing()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class _Properties:
    """The properties of the emulated GPU: Megatron does not choose its kernels by size."""

    major, minor, total_memory, name, multi_processor_count, uuid = 9, 0, 80 * _GIB, "cpu", 1, "cpu"


def _answer(value: Any) -> Callable[[Any], Any]:
    """A function that returns the same value for any arguments."""
    return lambda _: lambda *_, **__: value


def _constant(original: Any) -> Any:
    """A function that keeps returning its current value."""
    value = original()
    return lambda: value


def _instead(replacement: Any) -> Callable[[Any], Any]:
    return lambda _: replacement


def _to_megatron(value: Callable[[], Any]) -> Callable[[Any], Any]:
    """A function that returns `value()` to callers in Megatron, and torch's own result to all others."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def answer(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            return value() if caller.startswith(("megatron.", "transformer_engine.")) else original(*args, **kwargs)

        return answer

    return make


def _is_on_a_gpu(original: Any) -> Any:
    """`Tensor.is_cuda`: yes for TransformerEngine, which refuses tensors elsewhere."""

    def is_cuda(tensor: Any) -> bool:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return caller.startswith("transformer_engine.") or bool(original.__get__(tensor))

    return property(is_cuda)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str | torch.device):
        return torch.device(device).type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _on_cpu(original: Any) -> Any:
    """A tensor factory that uses the CPU instead of a GPU, and pins nothing."""

    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    return factory


def _to(original: Any) -> Any:
    @functools.wraps(original)
    def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if args and _is_cuda(args[0]):
            args = (_CPU, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return original(tensor, *args, **kwargs)

    return to


def _type(original: Any) -> Any:
    @functools.wraps(original)
    def type_(tensor: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original(tensor, dtype, *args, **kwargs)
        return original(tensor).replace("torch.", "torch.cuda.", 1)

    return type_


def _type_of_double(original: Any) -> Any:
    """Wraps `_type`: a double is what Megatron calls a float."""

    @functools.wraps(original)
    def type_(tensor: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        type_name = original(tensor, dtype, *args, **kwargs)
        return type_name.replace("DoubleTensor", "FloatTensor") if dtype is None else type_name

    return type_


def _with_main_parameters(original: Any) -> Any:
    """`sharded_state_dict` of an optimizer of fp16, where a parameter in double is its own main parameter."""

    @functools.wraps(original)
    def sharded_state_dict(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        halves, mains = optimizer.float16_groups, optimizer.fp32_from_float16_groups
        optimizer.float16_groups = optimizer.fp32_from_float16_groups = optimizer.fp32_from_fp32_groups
        try:
            return original(optimizer, *args, **kwargs)
        finally:
            optimizer.float16_groups, optimizer.fp32_from_float16_groups = halves, mains

    return sharded_state_dict


def _with_parameters_in_double(original: Any) -> Any:
    """`validate_args`, which names the type of the parameters."""

    @functools.wraps(original)
    def validate(args: Any, *rest: Any, **kwargs: Any) -> Any:
        validated = original(args, *rest, **kwargs)
        if args.params_dtype == torch.float16:
            args.params_dtype = torch.float64
        return validated

    return validate


def _with_single_scales(original: Any) -> Any:
    """`_amp_foreach_non_finite_check_and_unscale_`, with scale and flag in the type that it accepts."""

    @functools.wraps(original)
    def check(gradients: Any, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        found = found_inf.to(_SINGLE)
        original(gradients, found, inv_scale.to(_SINGLE))
        found_inf.copy_(found)

    return check


def _without(*names: str) -> Callable[[Any], Any]:
    """The function, ignoring some keyword arguments."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **{name: value for name, value in kwargs.items() if name not in names})

        return called

    return make


def _itself(_: Any) -> Any:
    return lambda thing, *_, **__: thing


def _quiet_fork(logging: Any) -> Any:
    """The same module, with one warning of one logger filtered out."""
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    logger.addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
    return logging


def _counts_as_arrays(_: Any) -> Any:
    """`maybe_move_tensor_to_cpu`: what Megatron takes off a GPU is a NumPy array afterwards, if it asks for one."""

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return move


def _local_norm(_: Any) -> Any:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: PLC0415  (only with CPU emulation)

    return WrappedTorchNorm


def _marked_norm(original: Any) -> Any:
    """A torch norm that marks its parameters as apex's does: their gradients are sums over a slot's rows."""

    @functools.wraps(original)
    def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = original(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return new


# ---------------------------------------------------------------- what is replaced

_FACTORIES = (
    *("tensor", "as_tensor", "empty", "empty_like", "zeros", "zeros_like", "ones", "ones_like", "full", "arange"),
    *("linspace", "eye", "triu_indices", "rand", "randn", "randint"),
)
_MEMORY = (
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "device_memory_used"),
)

TORCH: tuple[Replacement, ...] = (
    Replacement(
        target="torch.utils._device:_device_constructors",
        why="`with torch.device(...)` knows factories by identity, and some are replaced here",
        make=_constant,
    ),
    Replacement(
        target="torch.cuda:is_available",
        why="Megatron asserts that there is a GPU; torch's optimizers would ask it for its streams",
        make=_to_megatron(lambda: True),
    ),
    Replacement(
        target="torch.cuda:device_count",
        why="Megatron makes its groups only where there are GPUs",
        make=_to_megatron(lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
    ),
    Replacement(
        target="torch.cuda:current_device",
        why="is passed on as the device of new tensors",
        make=_answer(_CPU),
    ),
    *(
        Replacement(target=f"torch.cuda:{name}", why="nothing to choose, wait for or free", make=_answer(None))
        for name in ("set_device", "synchronize", "empty_cache", "set_stream", "reset_peak_memory_stats")
    ),
    *(
        Replacement(target=f"torch.cuda:{name}", why="one stream, always done", make=_instead(_Nothing))
        for name in ("Stream", "Event", "current_stream", "default_stream")
    ),
    Replacement(target="torch.cuda:stream", why="one stream, always done", make=_answer(contextlib.nullcontext())),
    *(
        Replacement(target=f"torch.cuda.nvtx:{name}", why="no profiler listens", make=_answer(None))
        for name in ("range_push", "range_pop")
    ),
    *(
        Replacement(target=f"{module}:{name}", why="the CPU's generator is the only one", make=_instead(function))
        for module in ("torch.cuda", "torch.cuda.random")
        for name, function in (
            ("get_rng_state", lambda *_, **__: torch.get_rng_state()),
            ("set_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
            ("manual_seed", lambda seed: torch.default_generator.manual_seed(int(seed))),
        )
    ),
    *(
        Replacement(target=f"{module}:is_current_stream_capturing", why="no graph is captured", make=_answer(False))
        for module in ("torch.cuda", "torch.cuda.graphs")
    ),
    Replacement(target="torch:Tensor.is_cuda", why="TransformerEngine refuses tensors elsewhere", make=_is_on_a_gpu),
    Replacement(target="torch.cuda:get_device_properties", why="is printed and logged", make=_answer(_Properties())),
    Replacement(
        target="torch.cuda:get_device_capability",
        why="chooses between kernels that are switched off",
        make=_answer((9, 0)),
    ),
    *(Replacement(target=f"torch.cuda:{name}", why="is logged", make=_answer(0)) for name in _MEMORY),
    Replacement(
        target="torch.cuda:memory_stats", why="is logged", make=_instead(lambda *_, **__: collections.defaultdict(int))
    ),
    Replacement(target="torch.cuda:mem_get_info", why="is logged", make=_answer((80 * _GIB, 80 * _GIB))),
    *(Replacement(target=f"torch:{name}", why='Megatron passes device="cuda"', make=_on_cpu) for name in _FACTORIES),
    Replacement(target="torch:Tensor.cuda", why="tensors are where they have to be", make=_itself),
    Replacement(target="torch.nn:Module.cuda", why="modules are where they have to be", make=_itself),
    Replacement(target="torch:Tensor.record_stream", why="one stream, always done", make=_answer(None)),
    Replacement(target="torch:Tensor.pin_memory", why="there is nothing to pin for", make=_itself),
    Replacement(target="torch:Tensor.to", why='a tensor that is sent to "cuda" stays', make=_to),
    Replacement(
        target="torch:Tensor.type",
        why="the optimizer and the clipping compare it with torch.cuda.FloatTensor",
        make=_type,
    ),
    Replacement(
        target="torch.utils.data:DataLoader.__init__",
        why="Megatron has its loaders pin memory",
        make=_without("pin_memory"),
    ),
    Replacement(target="torch.distributed:init_process_group", why="gloo knows no device", make=_without("device_id")),
    Replacement(target="torch.distributed:barrier", why="gloo knows no device", make=_without("device_ids")),
)

DOUBLE: tuple[Replacement, ...] = (
    *(
        Replacement(
            target=f"torch.storage:{name}",
            why="torch builds this table when it first reads a tensor from a file, when its names already mean doubles",
            make=_constant,
        )
        for name in ("_dtype_to_storage_type_map", "_storage_type_to_dtype_map")
    ),
    *(
        Replacement(target=f"torch:{name}", why="what Megatron calls float32 is a double", make=_instead(torch.float64))
        for name in ("float32", "float")
    ),
    Replacement(
        target="torch:Tensor.float", why="what Megatron calls float32 is a double", make=_instead(torch.Tensor.double)
    ),
    Replacement(
        target="torch:Tensor.half",
        why="a model of --fp16 is calculated in doubles, under the loss scale that it would have",
        make=_instead(torch.Tensor.double),
    ),
    Replacement(target="torch:Tensor.type", why="the clipping accepts nothing but a FloatTensor", make=_type_of_double),
    Replacement(
        target="torch:_amp_foreach_non_finite_check_and_unscale_",
        why="it accepts a loss scale in float32 alone, which loses nothing: it is a power of two",
        make=_with_single_scales,
    ),
)

DOUBLE_IN_MEGATRON: tuple[Replacement, ...] = (
    Replacement(
        target="megatron.training.arguments:validate_args",
        why="the parameters of --fp16 are doubles",
        make=_with_parameters_in_double,
    ),
    Replacement(
        target="megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params.sharded_state_dict",
        why="it saves the state of parameters in half precision alone, and here they are doubles",
        make=_with_main_parameters,
    ),
)

MEGATRON: tuple[Replacement, ...] = (
    Replacement(
        target="megatron.training.arguments:parse_args",
        why="recipes for GPUs ask for kernels and services that a CPU has not",
        make=with_cpu_arguments,
    ),
    Replacement(
        target="megatron.core.tensor_parallel.random:_get_cuda_rng_state",
        why="dropout and initialization draw from the CPU's generator",
        make=_instead(lambda *_, **__: torch.get_rng_state()),
    ),
    Replacement(
        target="megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        why="as above",
        make=_instead(lambda state, *_, **__: torch.set_rng_state(state)),
    ),
    Replacement(
        target="megatron.core.tensor_parallel.random:logging",
        why="it warns in every layer that the CPU's generator has moved, which is intended here",
        make=_quiet_fork,
    ),
    Replacement(
        target="megatron.training.training:set_jit_fusion_options",
        why="draws numbers from a GPU's generator, by the TP degree; on the CPU that would change the weights",
        make=_answer(None),
    ),
    Replacement(
        target="megatron.core.models.hybrid.hybrid_block:TENorm",
        why="the last norm of a hybrid model is TransformerEngine's, whatever its layers are",
        make=_local_norm,
    ),
    Replacement(
        target="megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        why="it refuses sequence parallelism; apex has a norm for that, but needs a GPU",
        make=_marked_norm,
    ),
    Replacement(
        target="megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
        why="the numbers of tokens for each expert become an array only where they come from a GPU",
        make=_counts_as_arrays,
    ),
    Replacement(
        target="megatron.core.datasets.utils:compile_helpers",
        why="the wheel has the helpers compiled, and no Makefile",
        make=_answer(None),
    ),
    Replacement(
        target="megatron.core.dist_checkpointing.strategies.filesystem_async:_process_memory",
        why="writing a checkpoint logs it, and asks psutil, which the wheel does not bring",
        make=_answer(0),
    ),
    *DELTA_NET,
)
