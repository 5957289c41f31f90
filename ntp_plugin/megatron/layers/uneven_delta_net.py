"""Gated delta nets of any width, from an unmodified class.

The unit is a key head with its value heads. A slot holds the rows of its units in several *sections* (queries, keys,
values, gates and two numbers for each value head), so each section is a run of its own. The convolution has those of
queries, keys and values, and weights the channels of its slot; the output projection has a column for each value.

Megatron saves each section as a tensor of its own, which `checkpoint/checkpoints.py` follows.
"""

import contextlib
import copy
import functools
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

from ntp_plugin.megatron.layers.uneven_layers import UnevenLayers, set_cut
from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.units import Family, Run, Tensor

DELTA_NET = "delta net"
_PACKAGE = "megatron.core.ssm.gated_delta_net"


class UnevenDeltaNet:
    """Replaces the constructor of Megatron's layer."""

    def __init__(self, layers: UnevenLayers) -> None:
        self._layers = layers

    def layer(self, original: Any) -> Any:
        """`_GDNBase.__init__`, which divides all of its heads by the width."""

        @functools.wraps(original)
        def init(module: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            heads = config.linear_num_key_heads
            family = self._layers.family(DELTA_NET, heads)
            virtual = copy.copy(config)
            virtual.linear_num_key_heads = self._layers.virtual(family)
            virtual.linear_num_value_heads = virtual.linear_num_key_heads * (config.linear_num_value_heads // heads)
            virtual.tensor_model_parallel_size = self._layers.layout.width
            with self._layers.cutting(family), _on_the_default_device():
                original(module, virtual, *args, **kwargs)
            self._describe(module, family)

        return init

    def _describe(self, module: Any, family: Family) -> None:
        channels = [module.qk_dim_local_tp, module.qk_dim_local_tp, module.v_dim_local_tp]
        self._cut(module.in_proj, family, module.in_proj_split_sections)
        self._cut(module.conv1d, family, channels)
        for parameter in (module.A_log, module.dt_bias):
            self._set(parameter, family, [parameter.shape[0]])
        self._set(module.out_proj.weight, family, [module.v_dim_local_tp], dim=1)

    def _cut(self, layer: Any, family: Family, sections: Sequence[int]) -> None:
        self._set(layer.weight, family, sections)
        if getattr(layer, "bias", None) is not None and layer.bias.numel():  # TransformerEngine's is empty without
            self._set(layer.bias, family, sections)

    def _set(self, parameter: torch.nn.Parameter, family: Family, sections: Sequence[int], *, dim: int = 0) -> None:
        """Describe a parameter whose slot has sections of these sizes along a dim."""
        held = sp.size(self._layers.layout.held(family))
        units = [size // held for size in sections]
        ends = list(accumulate(unit * family.units for unit in units))
        runs = tuple(
            Run(start=end - unit * family.units, unit_size=unit) for end, unit in zip(ends, units, strict=True)
        )
        shape = (*parameter.shape[:dim], ends[-1], *parameter.shape[dim + 1 :])
        assert parameter.shape[dim] == sum(units) * held, f"a part of {tuple(parameter.shape)} has other sections"
        vars(parameter).update(tensor_model_parallel=True, partition_dim=dim)  # on meta TransformerEngine puts it off
        set_cut(parameter, Tensor(name="", shape=shape, family=family.name, dim=dim, runs=runs), family)


@contextlib.contextmanager
def _on_the_default_device() -> Iterator[None]:
    """Have the layer, which names the current GPU, follow the device that it is built for.

    On the meta device nothing is allocated then, and nothing drawn from the GPU's generator. All other callers get the
    GPU: TransformerEngine asks for its properties.
    """
    device, current = torch.get_default_device(), torch.cuda.current_device
    if device.type != "meta":
        yield
        return

    def current_device() -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return device if caller.startswith(_PACKAGE) else current()

    torch.cuda.current_device = current_device
    try:
        yield
    finally:
        torch.cuda.current_device = current
