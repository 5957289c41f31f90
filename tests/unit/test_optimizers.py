"""The table of known optimizers, against what they do."""

import pytest
import torch

from ntp_plugin.copies.inventory import require_known
from ntp_plugin.errors import Refused
from ntp_plugin.training.optimizers import (
    INVENTORY,
    KNOWN,
    CombinedOptimizer,
    Numbers,
    element_wise,
    kept,
    kept_by,
    refuse_unknown_state,
)
from tests.harness.parity.group_adam import FusedAdam

TORCH = {
    "Adam": {"weight_decay": 0.1},
    "AdamW": {"amsgrad": True},
    "SGD": {"weight_decay": 0.1},
    "SGD, momentum": {"momentum": 0.9, "nesterov": True},
}


def make(name, parameters):
    return getattr(torch.optim, name.partition(",")[0])(parameters, lr=0.1, **TORCH.get(name, {}))


def steps(name, parts, gradients):
    """The result of three steps on a matrix in parts."""
    parameters = [torch.nn.Parameter(part.clone()) for part in parts]
    optimizer = make(name, parameters)
    for gradient in gradients:
        for parameter, part in zip(parameters, gradient.split([len(part) for part in parts]), strict=True):
            parameter.grad = part.clone()
        optimizer.step()
    return optimizer, parameters


def weights_in_parts(name, sizes):
    draw = torch.Generator().manual_seed(0)
    matrix, *gradients = torch.randn(4, 7, 5, generator=draw, dtype=torch.float64)
    return torch.cat([part.detach() for part in steps(name, matrix.split(sizes), gradients)[1]])


@pytest.mark.parametrize("name", TORCH)
def test_a_known_optimizer_steps_parts_as_the_full_tensor(name):
    assert torch.equal(weights_in_parts(name, [7]), weights_in_parts(name, [2, 1, 4]))


@pytest.mark.parametrize("name", TORCH)
def test_state_of_a_known_optimizer_is_in_the_table(name):
    optimizer, (parameter,) = steps(name, [torch.ones(3, 2)], [torch.ones(3, 2)])
    known = element_wise(optimizer)
    refuse_unknown_state(known, "w", parameter, optimizer.state[parameter])
    tensors = {key for key, value in optimizer.state[parameter].items() if getattr(value, "shape", ()) == (3, 2)}
    assert tensors <= set(known.cut)
    assert len(tensors) == {"SGD": 0, "SGD, momentum": 1, "Adam": 2, "AdamW": 3}[name]


@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_an_optimizer_that_is_not_element_wise_is_refused_by_its_name(name):
    assert not torch.equal(weights_in_parts(name, [7]), weights_in_parts(name, [2, 1, 4])), "so it has to be"
    with pytest.raises(Refused, match=rf"torch\.optim\.\S*{name} is not known to be element-wise.*Fix: use SGD"):
        element_wise(make(name, [torch.nn.Parameter(torch.ones(3, 2))]))


def test_a_subclass_is_another_optimizer():
    class DistributedShampoo(torch.optim.Adam):
        pass

    with pytest.raises(Refused, match="DistributedShampoo is not known"):
        element_wise(DistributedShampoo([torch.nn.Parameter(torch.ones(2))]))


def test_state_that_is_not_in_the_table_is_refused_by_its_name():
    parameter, known = torch.ones(4, 2), element_wise(make("Adam", [torch.nn.Parameter(torch.ones(1))]))
    for state in ({"preconditioner": torch.ones(4, 4)}, {"exp_avg": torch.ones(4)}, {"step": torch.ones(2)}):
        (key,) = state
        with pytest.raises(Refused, match=f"keeps {key} of shape .* for w of shape .4, 2."):
            refuse_unknown_state(known, "w", parameter, state)


def test_an_option_that_makes_an_element_depend_on_its_place_is_refused():
    with pytest.raises(Refused, match="fused = True"):
        element_wise(torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], fused=True))


# ---------------------------------------------------------------- NVIDIA's and DeepSpeed's, whose kernels need a GPU


def stand_in(module, name, **attributes):
    """An object whose class says that it comes from a module; nothing of the table is imported."""
    kind = type(name, (), {"__module__": module, "param_groups": [{"params": []}]})
    made = kind()
    for key, value in attributes.items():
        setattr(made, key, value)
    return made


FUSED = [place for place in KNOWN if not (place[0].startswith("torch.") or KNOWN[place].steps_matrices)]
MUON = "megatron.core.optimizer.emerging_optimizers", "TensorParallelMuon"


@pytest.mark.parametrize(("module", "name"), FUSED)
def test_fused_optimizers_are_identified_by_module_and_kernel(module, name):
    known = KNOWN[module, name]
    assert element_wise(stand_in(module, name, **{known.carries: print})) is known
    with pytest.raises(Refused, match=f"{name} has no {known.carries}: it is another one of that name"):
        element_wise(stand_in(module, name))
    with pytest.raises(Refused, match="is not known"):
        element_wise(stand_in("apex.something.else", name, **{known.carries: print}))


def test_one_of_whole_matrices_is_refused_unless_who_has_it_cuts_none():
    """As a shard or in a narrower layout it would step other matrices; among several, as Megatron's are, its state
    moves."""
    matrix, other = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    muon, adam = stand_in(*MUON, scaled_orthogonalize_fn=print), torch.optim.Adam([other])
    muon.param_groups = [{"params": [matrix]}]
    with pytest.raises(Refused, match="TensorParallelMuon steps whole matrices"):
        element_wise(muon)
    assert kept_by(muon) is KNOWN[MUON], "where nothing is cut"
    several = CombinedOptimizer([muon, adam], {matrix: {"momentum_buffer": torch.ones(2, 2)}, other: {"step": 3}})
    assert set(element_wise(several).cut) >= {"momentum_buffer", "exp_avg", "exp_avg_sq"}
    assert [Numbers(several).of(one) for one in (matrix, other)] == [{}, {"step": 3}]


def test_what_is_required_of_copies_is_that_of_a_parameters_own_optimizer():
    """A fused Adam counts in its group, and an optimizer beside it does not."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    fused, plain = FusedAdam([parameters[0]]), torch.optim.SGD([parameters[1]], lr=0.1)
    numbers = Numbers(CombinedOptimizer([fused, plain], {}))
    assert [numbers.required(one) for one in parameters] == [("step",), ()]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16])
def test_states_with_one_scale_for_all_elements_are_refused(dtype):
    module, name = FUSED[0]
    with pytest.raises(Refused, match=rf"exp_avg_dtype = {dtype}: it keeps a scale for all elements of a tensor"):
        element_wise(stand_in(module, name, multi_tensor_adam=print, exp_avg_dtype=dtype))
    element_wise(stand_in(module, name, multi_tensor_adam=print, exp_avg_dtype=torch.float32))


def test_masters_that_are_kept_beside_the_state_are_refused():
    """apex's; TransformerEngine's are in it."""
    own = {"multi_tensor_adam": print, "master_weights": True}
    with pytest.raises(Refused, match="master_weights = True: it keeps them beside its state"):
        element_wise(stand_in("apex.optimizers.fused_adam", "FusedAdam", **own, param_groups_master=[]))
    element_wise(stand_in("transformer_engine.pytorch.optimizers.fused_adam", "FusedAdam", **own))


def stepped_in_groups(times):
    """Two groups; the second has no parameter here, and is not counted."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([{"params": [parameter]}, {"params": [], "weight_decay": 0.1}])
    for _ in range(times):
        parameter.grad = torch.ones(3)
        optimizer.step()
    return parameter, optimizer


def test_numbers_of_a_group_go_with_its_parameters():
    parameter, optimizer = stepped_in_groups(2)
    assert Numbers(optimizer).of(parameter) == {"step": 2}
    assert kept(optimizer) == [f"what the optimizer keeps as {key}" for key in ("exp_avg", "exp_avg_sq", "step")]
    assert require_known(kept(optimizer), INVENTORY, strict=True) == []
    other, theirs = stepped_in_groups(0)
    assert Numbers(theirs).of(other) == {}
    Numbers(theirs).put(other, {"step": 7})
    assert [group.get("step") for group in theirs.param_groups] == [7, None]
    assert not theirs.state, "nothing of it is the parameter's own"
    Numbers(theirs).forget()
    assert not any("step" in group for group in theirs.param_groups)


def test_numbers_of_a_parameter_stay_there():
    optimizer, (parameter,) = steps("Adam", [torch.ones(3, 2)], [torch.ones(3, 2)])
    numbers = Numbers(optimizer).of(parameter)
    assert numbers.keys() == {"step"}
    other = make("Adam", [torch.nn.Parameter(torch.ones(3, 2))])
    (theirs,) = other.param_groups[0]["params"]
    Numbers(other).put(theirs, numbers)
    assert other.state[theirs] == {"step": numbers["step"]}
    assert "step" not in other.param_groups[0]


@pytest.mark.parametrize("name", TORCH)
def test_state_of_a_known_optimizer_passes_the_inventory(name):
    optimizer, (parameter,) = steps(name, [torch.ones(3, 2)], [torch.ones(3, 2)])
    assert len(kept(optimizer)) == len(optimizer.state[parameter])
    assert require_known(kept(optimizer), INVENTORY, strict=True) == []


def test_error_feedback_is_refused_by_its_name():
    optimizer, (parameter,) = steps("Adam", [torch.ones(3, 2)], [torch.ones(3, 2)])
    optimizer.state[parameter]["worker_error"] = torch.zeros(3, 2)
    with pytest.raises(Refused, match="does not know what the optimizer keeps as worker_error"):
        require_known(kept(optimizer), INVENTORY, strict=True)
