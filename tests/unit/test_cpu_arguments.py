"""What the CPU emulation makes of a recipe for GPUs: its arguments, and whether TransformerEngine is asked for."""

import argparse
import enum

import pytest

from ntp_plugin.errors import ConfigError
from ntp_plugin.megatron.cpu_arguments import ON_A_CPU, changed, with_cpu_arguments
from ntp_plugin.megatron.te_emulation import extension, importing


class Backend(enum.Enum):
    flash = 1
    unfused = 2
    auto = 3
    fused = 4
    local = 5


def arguments(**values):
    return argparse.Namespace(rank=0, **values)


def test_fusions_are_switched_off_and_what_suits_a_cpu_stays():
    found = changed(arguments(distributed_backend="nccl", apply_rope_fusion=True, bias_gelu_fusion=False, lr=1.0))
    assert found == {"distributed_backend": "gloo", "apply_rope_fusion": False}


@pytest.mark.parametrize(("backend", "wanted"), [(Backend.flash, Backend.unfused), (Backend.unfused, None)])
def test_attention_is_unfused(backend, wanted):
    assert changed(arguments(attention_backend=backend)).get("attention_backend") is wanted


@pytest.mark.parametrize(
    ("backend", "wanted"), [(Backend.auto, Backend.fused), (Backend.unfused, Backend.fused), (Backend.fused, None)]
)
def test_attention_is_fused_with_context_parallelism_alone(backend, wanted):
    given = {"attention_backend": backend, "attention_dropout": 0.0}
    assert changed(arguments(context_parallel_size=2, **given)).get("attention_backend") is wanted
    assert changed(arguments(context_parallel_size=1, **given)).get("attention_backend", backend) is Backend.unfused


def test_local_attention_stays():
    assert changed(arguments(attention_backend=Backend.local)) == {}


def test_dropout_of_attention_with_context_parallelism_is_refused():
    given = arguments(attention_backend=Backend.auto, context_parallel_size=2, attention_dropout=0.1)
    with pytest.raises(ConfigError, match=r"no --attention-dropout 0\.1 with --context-parallel-size 2"):
        changed(given)


def test_changes_are_printed_once_in_one_line(capsys):
    parse = with_cpu_arguments(lambda: arguments(**{name: object() for name in ON_A_CPU}))
    parsed = parse()
    assert {name: getattr(parsed, name) for name in ON_A_CPU} == dict(ON_A_CPU)
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["pretrain_gpt.py", "--num-layers", "2"], True),
        (["pretrain_gpt.py", "--transformer-impl", "transformer_engine"], True),
        (["pretrain_gpt.py", "--transformer-impl", "local"], False),
        (["pretrain_gpt.py", "--transformer-impl=local"], False),
        (["train.py"], False),
        ([], False),
    ],
)
def test_transformer_engine_is_emulated_where_megatrons_arguments_ask_for_it(words, wanted):
    assert importing.is_wanted(words) is wanted


def test_arguments_in_a_file_are_read(tmp_path):
    path = tmp_path / "some.args"
    path.write_text("--num-layers 2\n--transformer-impl local\n")
    assert not importing.is_wanted(["pretrain_gpt.py", f"@{path}"])
    assert importing.is_wanted(["pretrain_gpt.py", f"@{path}", "--transformer-impl", "transformer_engine"]), "last wins"


def test_without_the_package_there_is_one_line_that_says_how(monkeypatch):
    monkeypatch.setattr(importing, "is_installed", lambda: False)
    monkeypatch.delitem(importing.sys.modules, extension.NAME, raising=False)
    with pytest.raises(importing.ConfigError, match=r"transformer-engine is not installed\. Fix: pip install"):
        importing.install()
