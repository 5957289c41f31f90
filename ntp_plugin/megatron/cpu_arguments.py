"""The arguments of Megatron that a CPU cannot have, and what the emulation makes of them.

A recipe for GPUs runs as it is under `NTP_CPU=1`: fusions that need a compiled kernel are switched off, communication
goes over gloo, which has no average (DDP scales before it sums), and attention is unfused, or fused where context
parallelism needs it. What is computed stays the same but for rounding. Changed arguments are printed in one line.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ntp_plugin.errors import ConfigError

ON_A_CPU: Mapping[str, Any] = {
    "distributed_backend": "gloo",
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "no_persist_layer_norm": True,
    "cross_entropy_loss_fusion": False,
    "tp_comm_overlap": False,
    "ddp_average_in_collective": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "cuda_graph_impl": "none",
}
"""Argument -> its value on a CPU."""


def changed(arguments: Any) -> dict[str, Any]:
    """What is to be changed in the arguments, with the attention backend by the enum that Megatron has for it."""
    wanted = {name: value for name, value in ON_A_CPU.items() if getattr(arguments, name, value) != value}
    backend = getattr(arguments, "attention_backend", None)
    if backend is not None and backend.name not in ("local", _attention(arguments)):
        wanted["attention_backend"] = type(backend)[_attention(arguments)]
    if getattr(arguments, "moe_token_dispatcher_type", None) == "flex":  # the kernels of DeepEP need a GPU
        wanted["moe_token_dispatcher_type"] = "alltoall"
    if getattr(arguments, "defer_embedding_wgrad_compute", False):  # which needs the fusion
        wanted.pop("gradient_accumulation_fusion", None)
    if getattr(arguments, "async_save", False) and getattr(arguments, "async_strategy", "mcore") != "mcore":
        wanted["async_strategy"] = "mcore"  # a thread writes: the process of another strategy needs a GPU
    return wanted


def _attention(arguments: Any) -> str:
    """The backend of attention: TransformerEngine has context parallelism in fused attention alone.

    Raises:
        ConfigError: With dropout, which the emulation's fused attention has not.
    """
    size = getattr(arguments, "context_parallel_size", 1)
    if size == 1:
        return "unfused"
    if arguments.attention_dropout:
        raise ConfigError(
            f"NTP_CPU has no --attention-dropout {arguments.attention_dropout} with --context-parallel-size {size}: "
            "fused attention on a CPU is without",
            fix="--attention-dropout 0; or --context-parallel-size 1",
        )
    return "fused"


def with_cpu_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    """`parse_args`, which gives arguments that a CPU can have."""

    @functools.wraps(original)
    def parse(*given: Any, **kwargs: Any) -> Any:
        arguments = original(*given, **kwargs)
        changes = changed(arguments)
        vars(arguments).update(changes)
        if changes and arguments.rank == 0:
            words = ", ".join(f"{name} = {getattr(value, 'name', value)}" for name, value in changes.items())
            sys.stderr.write(f"ntp: on a CPU (NTP_CPU): {words}\n")
        return arguments

    return parse
