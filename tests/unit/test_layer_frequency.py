"""Which layers have experts, as Megatron's --moe-layer-freq says it, and nothing that a file could run."""

import pytest

from ntp_plugin.config.layer_frequency import layers_by_frequency
from ntp_plugin.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", "111111"),
        ("2", "101010"),
        ("4", "100010"),
        ("([0]*3+[1]*3)", "000111"),
        ("[0, 1] * 3", "010101"),
        ("[1]*2+[0]*2+[1]+[0]", "110010"),
    ],
)
def test_a_number_and_a_pattern(text, expected):
    assert "".join(str(int(layer)) for layer in layers_by_frequency(text, 6)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "moe_layer_freq = 0 must be at least 1"),
        ("-1", "is neither a number nor a pattern"),
        ("", "is neither a number nor a pattern"),
        ("True", "is neither a number nor a pattern"),
        ("[[1]]*6", "is neither a number nor a pattern"),
        ("[1]*10**9", "is neither a number nor a pattern"),
        ("[1]*9999999", "is neither a number nor a pattern"),
        ("__import__('os').getcwd()", "is neither a number nor a pattern"),
        ("[1]*5", "has 5 layers, and the model 6"),
        ("[2]*6", "has 6 layers, and the model 6. Fix: write 0 or 1 for each layer"),
    ],
)
def test_anything_else_is_one_clear_line(text, message):
    with pytest.raises(ConfigError) as refused:
        layers_by_frequency(text, 6)
    assert message in str(refused.value)
