"""Gives a model the layers of another one: of the stage that it is now, where layers have moved.

The layers that the stage keeps stay the same objects, found by their numbers in the whole model; so do all modules that
both models have under one name. Others are dropped, or taken from the model that was built on the meta device. What is
taken gets memory, and no values: state comes to it as to all parameters.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_defaults_if_not_set_tensor_model_parallel_attributes

from ntp_plugin.errors import Refused


def have_layers_of(model: torch.nn.Module, built: torch.nn.Module) -> None:
    """Give a model the modules of the one that was built, and keep all that both have."""
    example = next(model.parameters(), None)
    for name in set(model._modules) - set(built._modules):
        del model._modules[name]
        vars(model).update({name: vars(built)[name]} if name in vars(built) else {})
    for name, new in built._modules.items():
        own = model._modules.get(name)
        if (
            isinstance(new, torch.nn.ModuleList)
            and isinstance(own, torch.nn.ModuleList)
            and _are_numbered([*new, *own])
        ):
            _have_numbered(own, new, example)
        elif isinstance(own, torch.nn.Module) and type(own) is type(new):
            have_layers_of(own, new)
        else:
            vars(model).pop(name, None)
            model._modules[name] = new if new is None else _with_memory(new, example)
    _have_parameters_of(model, built, example)
    ordered = {name: model._modules[name] for name in built._modules}
    model._modules.clear()
    model._modules.update(ordered)


def _are_numbered(layers: list[torch.nn.Module]) -> bool:
    return bool(layers) and all(isinstance(getattr(layer, "layer_number", None), int) for layer in layers)


def _have_numbered(own: torch.nn.ModuleList, new: torch.nn.ModuleList, example: Any) -> None:
    known: dict[Any, torch.nn.Module] = {layer.layer_number: layer for layer in own}
    layers = [known.get(layer.layer_number) or _with_memory(layer, example) for layer in new]
    own._modules.clear()
    own._modules.update({str(place): layer for place, layer in enumerate(layers)})
    for layer, wanted in zip(layers, new, strict=True):
        have_layers_of(layer, wanted)


def _have_parameters_of(model: torch.nn.Module, built: torch.nn.Module, example: Any) -> None:
    """Have a parameter that only the built module has: an output layer of tied weights has none in a single stage."""
    for name, new in built._parameters.items():
        if (model._parameters.get(name) is None) != (new is None):
            model._parameters[name] = None if new is None else _in_memory(new, example)


def _with_memory(module: torch.nn.Module, example: Any) -> torch.nn.Module:
    """Return the module with memory for its parameters, of the dtype and on the device of an example."""
    for name, part in module.named_modules():
        kept = {**part._buffers, **{key: value for key, value in vars(part).items() if torch.is_tensor(value)}}
        strange = [key for key, value in kept.items() if value is not None and value.is_meta]
        if strange:
            raise Refused(
                f"a stage would get the layer {name or type(module).__name__} with values in {strange[0]}, which are no"
                " parameter, so nobody sends them",
                fix="--ntp-actions-forbid move-layers: a replica that has lost a stage is then dropped",
            )
        for key, parameter in part._parameters.items():
            if parameter is not None and parameter.is_meta:
                part._parameters[key] = _in_memory(parameter, example)
    return module


def _in_memory(parameter: torch.nn.Parameter, example: Any) -> torch.nn.Parameter:
    made = torch.nn.Parameter(
        torch.empty(parameter.shape, dtype=example.dtype, device=example.device), requires_grad=parameter.requires_grad
    )
    vars(made).update(vars(parameter))
    set_defaults_if_not_set_tensor_model_parallel_attributes(made)  # as Megatron does with a model that it has built
    return made
