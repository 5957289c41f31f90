"""Jobs with TransformerEngine's layers, Megatron's default, in the CPU emulation: a rank is killed and comes back."""

import json

import pytest

from tests.harness.parity.job import RECIPES
from tests.ranks.command import NTP, Command

RECIPE = RECIPES.parent / "chaos" / "megatron-transformer-engine.toml"


def verdict(tmp_path, *words):
    command = Command([*NTP, "chaos", "--out", str(tmp_path / "out"), str(RECIPE), *words], tmp_path / "log")
    code, output = command.end()
    return code, output, json.loads((tmp_path / "out" / "verdict.json").read_text())


@pytest.mark.short
def test_a_rank_is_killed_and_rejoins_and_the_weights_are_the_reference_runs(tmp_path):
    code, output, found = verdict(tmp_path)
    assert code == 0, output
    assert found["holds"]
    checked = {check["what"] for check in found["checks"]}
    assert "weights agree with the reference run's" in checked, "in float64, to 1e-12"


def test_the_sequence_is_cut_over_a_width_that_does_not_divide_it(tmp_path):
    """TP4 of which three are left, and 16 positions."""
    words = ["--standalone", "--nproc-per-node=8", str(RECIPES / "pretrain_gpt.py"), f"@{RECIPES / 'tiny-te.args'}"]
    more = ["--train-iters=80", "--tensor-model-parallel-size=4", "--sequence-parallel", "--ntp-enable"]
    code, output, found = verdict(tmp_path, "--", *words, *more)
    assert code == 0, output
    assert found["holds"]


def test_masks_outside_of_attention_are_exact(tmp_path):
    """Dropout of embeddings and layers, which is drawn by the plugin at any width."""
    words = ["--standalone", "--nproc-per-node=4", str(RECIPES / "pretrain_gpt.py"), f"@{RECIPES / 'tiny-te.args'}"]
    more = ["--train-iters=80", "--tensor-model-parallel-size=2", "--hidden-dropout=0.1", "--ntp-enable"]
    code, output, found = verdict(tmp_path, "--", *words, *more)
    assert code == 0, output
    assert found["holds"]


def test_attention_keeps_its_own_masks_and_the_job_goes_on(tmp_path):
    """They depend on the width, so the losses differ from the reference run's, by what masks make of them."""
    words = ["--standalone", "--nproc-per-node=4", str(RECIPES / "pretrain_gpt.py"), f"@{RECIPES / 'tiny-te.args'}"]
    more = ["--train-iters=80", "--tensor-model-parallel-size=2", "--attention-dropout=0.1", "--ntp-enable"]
    _, output, found = verdict(tmp_path, "--", *words, *more)
    wrong = {check["what"] for check in found["checks"] if not check["holds"]}
    assert wrong == {"losses agree with the reference run's", "weights agree with the reference run's"}, output
    assert "draw these masks by themselves" in (tmp_path / "out" / "broken" / "log.txt").read_text()


def test_a_deferred_gradient_is_computed_at_once_in_a_degraded_layout(tmp_path):
    """A step is interrupted before the last stage has computed the gradient of its output layer; later it defers
    again."""
    words = ["--standalone", "--nproc-per-node=8", str(RECIPES / "pretrain_gpt.py"), f"@{RECIPES / 'tiny-te.args'}"]
    more = ["--train-iters=80", "--tensor-model-parallel-size=2", "--pipeline-model-parallel-size=2"]
    defers = ["--defer-embedding-wgrad-compute", "--wgrad-deferral-limit=2", "--sequence-parallel", "--ntp-enable"]
    code, output, found = verdict(tmp_path, "--", *words, *more, *defers)
    assert code == 0, output
    assert found["holds"]
    assert "--defer-embedding-wgrad-compute is left out" in (tmp_path / "out" / "broken" / "log.txt").read_text()
