"""Builds the model again for a new layout, and copies the sizes into the real one.

A layer's width is written into many attributes of its modules, and the number of slots into what DDP keeps. The plugin
computes none of them. It builds the model again by the user's own recipe, with the layers of the new layout, on the
meta device, where nothing is allocated or drawn. Then every real module takes over the attributes that are numbers,
strings, lists of numbers or configurations. Parameters, buffers, hooks and all else of a module stay its own. DDP's
constructor runs again on the same object, with its first arguments: it makes new buffers and buckets.

Where layers have moved, a stage has other modules than before. Those that it keeps stay; the others are taken from what
was built, with memory of their own (`moved_modules.py`).

Autograd keeps what DDP attached to a parameter, even if only the traceback of an error refers to it. It forgets that
only when the parameter's dtype changes, so the dtype is changed for a moment.
"""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.extensions import transformer_engine as te
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.training.models.dist_utils import build_virtual_pipeline_stages

from ntp_plugin.megatron import moved_layers
from ntp_plugin.megatron.layers.dropout import ExactDropout
from ntp_plugin.megatron.layers.uneven_experts import NominalGroup
from ntp_plugin.megatron.layers.uneven_layers import copy_cuts
from ntp_plugin.megatron.live.loss_scale import numbers_of, set_numbers
from ntp_plugin.megatron.live.moved_modules import have_layers_of
from ntp_plugin.megatron.reduction.lane_sync import bare

_LAYOUT = "pipeline_model_parallel_layout"
_OF_TORCH = frozenset(vars(torch.nn.Module()))
"""The attributes that every module has, including `training`."""


class ModelRebuild:
    """The model of this rank, and how it was built."""

    def __init__(self, args: Any) -> None:
        self._args = args
        self._build: Callable[[], list[Any]] | None = None
        self._wrapped: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self._waiting: list[bool] = []
        """Whether the forward of each wrapped chunk waits for parameters, while that is switched off."""
        self.chunks: list[Any] = []
        self.optimizer: Any = None
        self.masks: ExactDropout | None = None
        """Replaces the model's dropouts, if masks are exact."""
        self.scheduler: Any = None
        self._build_optimizer: Callable[[], Any] | None = None
        self.optimizer_config: Any = None

    # ------------------------------------------------ recording how it is built

    def set_up(self, original: Any) -> Any:
        """`setup_model_and_optimizer`: remember how the model is built, and the result."""

        @functools.wraps(original)
        def set_up(model_type: Any, model_provider_func: Any = None, *rest: Any, **kwargs: Any) -> Any:
            self._build = functools.partial(_chunks, model_type, model_provider_func, kwargs.get("cfg_container"))
            built = original(model_type, model_provider_func, *rest, **kwargs)
            self.chunks, self.optimizer, self.scheduler = built
            return built

        return set_up

    def built_optimizer(self, original: Any) -> Any:
        """`get_megatron_optimizer`: remember its arguments."""

        @functools.wraps(original)
        def build(config: Any, *args: Any, **kwargs: Any) -> Any:
            self.optimizer_config = config
            self._build_optimizer = functools.partial(original, config, *args, **kwargs)
            return original(config, *args, **kwargs)

        return build

    def wrapper(self, original: Any) -> Any:
        """`DistributedDataParallel.__init__`: remember its arguments."""

        @functools.wraps(original)
        def init(ddp: Any, *args: Any, **kwargs: Any) -> None:
            if all(ddp is not known for known, _, _ in self._wrapped):
                module = kwargs["module"] if "module" in kwargs else args[2]
                names = {parameter: name for name, parameter in module.named_parameters()}
                self._wrapped.append((ddp, args, _keyed(kwargs, names)))
            original(ddp, *args, **kwargs)

        return init

    # ------------------------------------------------ building it again

    def elsewhere(self) -> list[torch.nn.Module]:
        """Return the model chunks as the current layers make them, without values."""
        assert self._build is not None, "a model has been set up"
        with torch.device("meta"), _on_its_own(self._args, bare(self.chunks[0]).config):
            chunks = self._build()
        if self.masks is not None:
            self.masks.into(chunks)
        return chunks

    def take_over(self, wanted: list[torch.nn.Module]) -> None:
        """Give the real modules the sizes of these."""
        for chunk, new in zip(self.chunks, wanted, strict=True):
            real = bare(chunk)
            have_layers_of(real, new)
            pairs = zip(real.named_modules(), new.named_modules(), strict=True)
            for (name, module), (other, model) in pairs:
                assert (name, type(module)) == (other, type(model)), "a recipe builds the same model again"
                _take_sizes(module, model, (real.config, new.config))
            _forget_what_is_deferred(real)
            copy_cuts(real, new)
            _have_groups_of(real, chunk)

    def stop_waiting(self) -> None:
        """Have no module's forward wait for parameters until DDP is made again: it knows the modules by which it waits,
        and they may change now. A loss may interrupt this, and what is done after it."""
        self._waiting = self._waiting or [forward_waits(ddp) for ddp, _, _ in self._wrapped]
        for ddp, _, _ in self._wrapped:
            set_forward_waits(ddp, waits=False)

    def wrap_again(self) -> None:
        """Have DDP make its buffers, buckets and hooks again, for the current parameters."""
        for (ddp, args, kwargs), waits in zip(self._wrapped, self._waiting, strict=True):
            ddp.grad_accs, ddp.buffers, ddp.bucket_groups, ddp.param_to_bucket_group = [], [], [], {}
            ddp.expert_parallel_buffers, ddp.expert_parallel_bucket_groups = [], []
            training = ddp.training
            for parameter in ddp.module.parameters():
                parameter.grad = parameter.main_grad = None
                _forget_hooks(parameter)
            type(ddp).__init__(ddp, *args, **_keyed(kwargs, dict(ddp.module.named_parameters())))
            set_forward_waits(ddp, waits=waits)
            ddp.train(training)
        self._waiting = []

    def build_optimizer_again(self) -> None:
        """Turn the existing optimizer object into what Megatron builds for the current parameters."""
        assert self._build_optimizer is not None, "an optimizer has been built"
        loss_scale = numbers_of(self.optimizer)
        self.optimizer.chained_optimizers.clear()  # frees the old state first, which may be as large as the new
        for parameter in (parameter for chunk in self.chunks for parameter in chunk.parameters()):
            vars(parameter).pop("main_param", None)  # Megatron's reference from a bf16 parameter to its float32 shard
        vars(self.optimizer).update(vars(self._build_optimizer()))
        set_numbers(self.optimizer, loss_scale)


def _keyed(kwargs: dict[str, Any], keys: Mapping[Any, Any]) -> dict[str, Any]:
    """Return DDP's arguments with other keys in its layout of parameters: their names, or the parameters of now. A
    parameter of a layer that went to another stage and came back is another one. Where layers have moved there is no
    such layout."""
    layout = kwargs.get("full_param_layout")
    if layout is None:
        return kwargs
    if not all(key in keys for one in layout.layouts.values() for key in one.param_index_map):
        return kwargs | {"full_param_layout": None}
    layouts = {
        kind: dataclasses.replace(one, param_index_map={keys[key]: place for key, place in one.param_index_map.items()})
        for kind, one in layout.layouts.items()
    }
    return kwargs | {"full_param_layout": dataclasses.replace(layout, layouts=layouts)}


def stages_in_config(args: Any) -> dict[str, Any]:
    """Return the stages of this rank's replica as a model's configuration has them, once it is made. Empty as long as
    no layer has moved."""
    if not moved_layers.nominal_stages(args):
        return {}
    found = moved_layers.stages_in_config(args)
    layout = found[_LAYOUT]
    if isinstance(layout, list):
        found[_LAYOUT] = PipelineParallelLayerLayout(layout, len(layout))
    return found


def forward_waits(ddp: Any) -> bool:
    """Whether the forward waits, module by module, for parameters that are on their way."""
    return bool(ddp.remove_forward_pre_hook_handles)


def set_forward_waits(ddp: Any, *, waits: bool) -> None:
    """Switch this waiting on or off."""
    if waits and not forward_waits(ddp):
        ddp.enable_forward_pre_hook()
    if forward_waits(ddp) and not waits:
        ddp.disable_forward_pre_hook(param_sync=False)


def _chunks(model_type: Any, provider: Any, container: Any) -> list[Any]:
    """Return the model without wrappers, as `setup_model_and_optimizer` builds it in either of its ways."""
    from megatron.training import get_args  # noqa: PLC0415

    config = getattr(container, "model", None)
    if config is not None:
        build = config.get_builder_cls()(config).build_model
    else:

        def build(groups: Any, **kwargs: Any) -> Any:
            return provider(config=None, pg_collection=groups, **kwargs)

    chunks: list[Any] = build_virtual_pipeline_stages(
        build,
        ProcessGroupCollection.use_mpu_process_groups(),
        get_args().virtual_pipeline_model_parallel_size,
        model_type,
    )
    return chunks


_WHILE_BUILT = {
    "use_cpu_initialization": True,
    "init_model_with_meta_device": True,
    "perform_initialization": False,
}
"""With these, Megatron names no other device, sums no embeddings over stages, and draws nothing."""


_CALLED_IN_A_STEP = (
    *("finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func", "timers"),
)
"""What a configuration refers to of the job; some layers copy their configuration with all that it refers to."""


@contextlib.contextmanager
def _on_its_own(*configured: Any) -> Iterator[None]:
    """Build on the meta device without other ranks, and without changes to the generators.

    TransformerEngine's layers name a device of their own.
    """
    state = torch.get_rng_state()
    hidden = dict.fromkeys(_CALLED_IN_A_STEP)
    before = [{key: value for key, value in vars(one).items() if key in {*_WHILE_BUILT, *hidden}} for one in configured]
    for one, was in zip(configured, before, strict=True):
        vars(one).update({key: value for key, value in (_WHILE_BUILT | hidden).items() if key in was})
    device_of = te._get_extra_te_kwargs
    te._get_extra_te_kwargs = lambda config: device_of(config) | {"device": "meta"}
    try:
        yield
    finally:
        te._get_extra_te_kwargs = device_of
        torch.set_rng_state(state)
        for one, was in zip(configured, before, strict=True):
            vars(one).update(was)


def _take_sizes(module: torch.nn.Module, model: torch.nn.Module, configs: tuple[Any, Any]) -> None:
    real, built = configs
    for key, value in vars(model).items():
        if key in _OF_TORCH:
            continue
        if type(value) is type(built):
            setattr(module, key, _as_changed(real, built, value))
        elif _is_plain(value) or _is_a_group(value):
            setattr(module, key, value)


def _forget_what_is_deferred(model: torch.nn.Module) -> None:
    """Drop the activations and gradients of a step that was interrupted before it had computed the gradient of its
    output layer (`--defer-embedding-wgrad-compute`). Megatron itself drops only the first."""
    for name in ("embedding_activation_buffer", "grad_output_buffer"):
        if isinstance(kept := getattr(model, name, None), list):
            kept.clear()


def _have_groups_of(model: torch.nn.Module, wrapper: Any) -> None:
    """Update the groups that a half-precision wrapper has kept since it wrapped the model: Megatron asks the wrapper
    first."""
    while wrapper is not model:
        if isinstance(getattr(wrapper, "pg_collection", None), ProcessGroupCollection):
            wrapper.pg_collection = model.pg_collection
        wrapper = wrapper.module


def _is_a_group(value: Any) -> bool:
    if isinstance(value, list) and value:  # the levels of a context group
        return all(map(_is_a_group, value))
    return isinstance(value, ProcessGroupCollection | dist.ProcessGroup | NominalGroup)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, list) and value:  # TransformerEngine's list of the ranks of a context group
        return all(isinstance(number, int) for number in value)
    return isinstance(value, bool | int | float | str)


def _as_changed(real: Any, built: Any, own: Any) -> Any:
    """Return the real configuration with the numbers in which a module's own differs from its model's."""
    changed = {
        key: value
        for key, value in vars(own).items()
        if isinstance(value, int) and key not in _WHILE_BUILT and vars(built).get(key) != value
    }
    if own is built or not changed:
        return real
    config = copy.copy(real)
    vars(config).update(changed)
    return config


def _forget_hooks(parameter: torch.nn.Parameter) -> None:
    values = parameter.data
    parameter.data = torch.empty(0, dtype=torch.bfloat16 if values.dtype != torch.bfloat16 else torch.float)
    parameter.data = values
