"""Recipes in the form of Megatron-LM's functional tests."""

import pytest

from ntp_plugin.errors import ConfigError
from ntp_plugin.megatron.recipe_file import hosts_in, words_of


def test_flags_are_written_as_a_command_line():
    recipe = {
        "ENV_VARS": {"CUDA_DEVICE_MAX_CONNECTIONS": 1},
        "MODEL_ARGS": {
            "--num-layers": 12,
            "--sequence-parallel": True,
            "--swiglu": False,
            "--moe-layer-freq": "[0, 1]",
            "--data-path": "a b",
            "--recompute-modules": ["core_attn", "mlp"],
        },
    }
    assert words_of(recipe, "x.yaml") == [
        *("--num-layers", "12", "--sequence-parallel", "--moe-layer-freq", "0", "1", "--data-path", "a", "b"),
        *("--recompute-modules", "core_attn", "mlp"),
    ]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (None, "x.yaml has no mapping MODEL_ARGS"),
        ({"MODEL_ARGS": ["--num-layers"]}, "x.yaml has no mapping MODEL_ARGS"),
        ({"MODEL_ARGS": {"num-layers": 2}}, "'num-layers' in MODEL_ARGS is no flag"),
    ],
)
def test_another_file_is_refused(recipe, message):
    with pytest.raises(ConfigError, match=message):
        words_of(recipe, "x.yaml")


def test_a_name_says_how_many_gpus():
    assert hosts_in("cases/gpt_te_tp2_dgx_a100_1N8G/model_config.yaml") == (1, 8)
    assert hosts_in("nemotron_gb200_12N4G_x/model_config.yaml") == (12, 4)
    assert hosts_in("gpt3_12N4Gb/model_config.yaml") is None
    assert hosts_in("gpt3_tp1_pp4/model_config.yaml") is None
