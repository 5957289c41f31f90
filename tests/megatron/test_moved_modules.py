"""A model gets the modules of another stage, and keeps what both have; in a process that Megatron may change."""

import os
import subprocess
import sys

import pytest

PROBE = """
import sys
from ntp_plugin.megatron import cpu_emulation
cpu_emulation.install(cpu_emulation.wanted())
import torch
from ntp_plugin.errors import Refused
from ntp_plugin.megatron.live.moved_modules import have_layers_of


class Layer(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        self.layer_number = number
        self.linear = torch.nn.Linear(4, 4)
        self.linear.weight.is_cut = True


class Stage(torch.nn.Module):
    # As in Megatron's models an attribute is a module in one stage, and None or missing in another.
    def __init__(self, numbers, *, first=False, last=False):
        super().__init__()
        if first:
            self.embedding = torch.nn.Embedding(8, 4)
        self.layers = torch.nn.ModuleList([Layer(number) for number in numbers])
        self.norm = torch.nn.LayerNorm(4) if last else None


def built(*args, **kwargs):
    with torch.device("meta"):
        return Stage(*args, **kwargs)


def names(model):
    return [name for name, _ in model.named_modules()]


def layers_that_both_have_stay_the_same_objects():
    model = Stage([3, 4], first=True)
    kept, embedding = model.layers[1], model.embedding
    have_layers_of(model, built([4, 5, 6], first=True))
    assert [layer.layer_number for layer in model.layers] == [4, 5, 6]
    assert model.layers[0] is kept
    assert model.embedding is embedding
    assert not any(parameter.is_meta for parameter in model.parameters())


def a_stage_becomes_the_last_one_and_the_first_again():
    model, last = Stage([1, 2], first=True).double(), built([2], last=True)
    have_layers_of(model, last)
    assert names(model) == names(last)
    assert not hasattr(model, "embedding")
    assert model.norm.weight.dtype == torch.float64
    have_layers_of(model, built([1, 2], first=True))
    assert model.norm is None
    assert names(model) == names(Stage([1, 2], first=True))
    assert model.embedding.weight.shape == (8, 4)


def what_is_written_on_a_parameter_comes_with_it():
    model = Stage([1])
    have_layers_of(model, built([1, 2]))
    weight = model.layers[1].linear.weight
    assert weight.is_cut
    assert weight.tensor_model_parallel is False, "Megatron's default"


def values_that_are_no_parameters_are_refused():
    model, other = Stage([1]), built([1, 2])
    other.layers[1].scale = torch.ones(1, device="meta")
    try:
        have_layers_of(model, other)
    except Refused as refusal:
        assert "Layer with values in scale" in str(refusal)
        assert "move-layers" in refusal.fix
    else:
        raise AssertionError("it is refused")


globals()[sys.argv[1]]()
"""


@pytest.mark.parametrize(
    "check",
    [
        "layers_that_both_have_stay_the_same_objects",
        "a_stage_becomes_the_last_one_and_the_first_again",
        "what_is_written_on_a_parameter_comes_with_it",
        "values_that_are_no_parameters_are_refused",
    ],
)
def test_moved_modules(check):
    words = [sys.executable, "-W", "ignore", "-c", PROBE, check]
    done = subprocess.run(words, env=os.environ | {"NTP_CPU": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
