"""Options that a degraded layout leaves out: when, in which objects, and what is reported."""

import logging
import types

import torch

from ntp_plugin.megatron import cpu_fused_gradients
from ntp_plugin.megatron.switched_off import SwitchedOff, wanted

GIVEN = {"defer_embedding_wgrad_compute": True, "tp_comm_overlap": True}


def test_user_buffers_stay_off_when_all_slots_are_back_and_a_deferred_gradient_does_not():
    assert not any(wanted(GIVEN, degraded=True).values())
    assert wanted(GIVEN, degraded=False) == {"defer_embedding_wgrad_compute": True, "tp_comm_overlap": False}


def test_an_option_that_a_recipe_does_not_give_is_never_switched_on():
    off = dict.fromkeys(GIVEN, False)
    assert wanted(off, degraded=False) == off


def test_arguments_and_configurations_are_set_and_one_rank_says_so_once(caplog):
    args, config = types.SimpleNamespace(**GIVEN), types.SimpleNamespace(**GIVEN)
    switched_off = SwitchedOff(args)
    with caplog.at_level(logging.WARNING):
        for degraded in (True, True, False):
            switched_off.for_layout([config], degraded=degraded, reports=True)
    assert vars(args) == vars(config) == {"defer_embedding_wgrad_compute": True, "tp_comm_overlap": False}
    assert [record.args[0] for record in caplog.records] == ["--defer-embedding-wgrad-compute", "--tp-comm-overlap"]


def test_the_fused_gradient_of_the_cpu_emulation_adds_what_autograd_computes():
    generator = torch.Generator().manual_seed(1)
    inputs, outputs = (torch.randn(5, size, generator=generator, dtype=torch.float64) for size in (3, 4))
    weight = torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    (inputs @ weight.t()).backward(outputs)
    main_grad = torch.ones(4, 3, dtype=torch.float64)
    cpu_fused_gradients._multiply_and_add(inputs, outputs, main_grad)
    torch.testing.assert_close(main_grad - 1, weight.grad)
