"""The recipes of `ntp plan`: models with experts have the parameters that their authors publish."""

from pathlib import Path

import pytest

from ntp_plugin.cli.main import main
from ntp_plugin.planning import plan, read_job
from ntp_plugin.planning.recovery_plan import Nominal

RECIPES = Path(__file__).parents[2] / "recipes/plan"


def units_of(name):
    return Nominal.of(read_job(RECIPES / f"{name}.toml")).units


@pytest.mark.parametrize(
    ("name", "billions"), [("mixtral-8x7b", 46.7), ("deepseek-v3", 671), ("qwen3-moe-235b", 235), ("llama-70b", 70.6)]
)
def test_parameters_are_as_many_as_published(name, billions):
    assert units_of(name).elements / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(("name", "billions"), [("mixtral-8x7b", 12.9), ("qwen3-moe-235b", 22)])
def test_a_token_uses_as_many_as_published(name, billions):
    assert units_of(name).elements_of_token / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_token_of_deepseek_v3_uses_37_billion_with_half_of_the_embedding():
    """The published number is between those with and without the embedding, which is looked up and not multiplied."""
    units = units_of("deepseek-v3")
    embedding = 129280 * 7168
    assert (units.elements_of_token - embedding) / 1e9 < 37 < units.elements_of_token / 1e9
    assert (units.elements_of_token - embedding / 2) / 1e9 == pytest.approx(37, rel=0.01)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_each_recipe_plans(path, capsys):
    assert main(["plan", str(path)]) == 0
    assert "micro-batches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "fullest", "step", "times"),
    [
        ("mixtral-8x7b", (1, 2), 1.14, {1.41, 1.0}),
        ("deepseek-v3", (4, 5), 1.07, {1.12, 1.0}),
        ("qwen3-moe-235b", (4, 5), 1.18, {1.04}),
    ],
)
def test_what_a_recipe_says_is_what_its_plan_has(name, fullest, step, times):
    found = plan(read_job(RECIPES / f"{name}.toml"))
    assert {group.fullest for group in found.expert_groups} == {fullest}
    assert found.batch.step_ns / found.batch.nominal_ns == pytest.approx(step, abs=0.006)
    assert {round(share.ns / 1e9, 2) for share in found.batch.shares} == times
