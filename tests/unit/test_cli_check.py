"""`ntp check` as a user types it, where no framework is needed: one clear line, and code 2."""

import io

import pytest
from rich.console import Console

from ntp_plugin.cli.check_tables import print_check
from ntp_plugin.cli.main import main
from ntp_plugin.config.sections import Parallel
from ntp_plugin.planning.job_check import JobCheck, UnsupportedOption
from ntp_plugin.planning.survival import Survival
from ntp_plugin.planning.topology import Topology

FILES = {
    "empty.json": "",
    "list.json": "[1]",
    "broken.json": "{",
    "empty.yaml": "",
    "other.yaml": "MODEL: {a: 1}",
    "broken.yaml": "MODEL_ARGS: [",
}

BAD = {
    "nothing": ([], "SCRIPT|RECIPE.yaml|DS_CONFIG.json"),
    "flags alone": (["--json"], "SCRIPT|RECIPE.yaml|DS_CONFIG.json"),
    "an unknown flag": (["--world-sise", "8", "train.py"], "did you mean --world-size"),
    "an unknown flag beside a configuration": (["broken.json", "--word-size", "8"], "did you mean --world-size"),
    "no ranks": (["--world-size", "0", "train.py"], "'0' is not a whole number from 1"),
    "two sizes": (["--world-size", "8", "--nnodes", "2", "train.py"], "--world-size and --nnodes are both given"),
    "a flag of DeepSpeed": (["--tp", "2", "pretrain_gpt.py"], "--tp is for a DeepSpeed configuration"),
    "no such file of arguments": (["pretrain_gpt.py", "@nothere.args"], "@nothere.args cannot be read"),
    "no such recipe": (["nothere.yaml"], "nothere.yaml cannot be read"),
    "an empty recipe": (["empty.yaml"], "empty.yaml has no mapping MODEL_ARGS"),
    "another yaml": (["other.yaml"], "other.yaml has no mapping MODEL_ARGS"),
    "a broken recipe": (["broken.yaml"], "broken.yaml cannot be read"),
    "no such configuration": (["nothere.json"], "nothere.json cannot be read"),
    "an empty configuration": (["empty.json"], "empty.json is empty"),
    "a list": (["list.json"], "must hold one JSON object"),
    "a broken configuration": (["broken.json"], "broken.json is not valid JSON"),
}


@pytest.mark.parametrize(("words", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_code_2(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    assert main(["check", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ntp: ")
    assert err.count("\n") == 1
    assert message in err


def test_the_help_says_what_the_exit_codes_mean(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["check", "--help"])
    assert ended.value.code == 0
    assert "0 the job is accepted, 1 it is not, 2 bad input" in capsys.readouterr().out


def printed(check):
    console = Console(file=io.StringIO(), width=140)
    print_check(check, console)
    return console.file.getvalue()


def test_what_comes_from_the_user_is_printed_as_it_is():
    option = UnsupportedOption(flag="--data-path [bold]x", why="is \x1b[31mred", fix="leave it out")
    text = printed(JobCheck(framework="megatron", unsupported=(option,), topology=Topology.of(Parallel(tp=2))))
    assert "--data-path [bold]x" in text
    assert "\x1b" not in text


def test_a_loss_that_only_some_slots_survive_may_end_the_job():
    some = Survival(
        kind="any one host",
        losses=90,
        planned=48,
        survived=40,
        state_from=("copies in memory",),
        step_time=1.25,
        example="node7",
        why="the hosts of its copies are lost as well",
        fix="set copies.count to 2",
        exit_code=4,
    )
    none = Survival(
        kind="any one slot", losses=8, planned=8, survived=0, state_from=(), step_time=None, example="r0", exit_code=3
    )
    topology = Topology.of(Parallel(tp=2, dp=4))
    text = printed(JobCheck(framework="megatron", unsupported=(), topology=topology, survivals=(some, none)))
    (row,) = (line for line in text.splitlines() if "any one host" in line and "may end" in line)
    assert "40 of 48 (90 in all)" in row
    assert "1.25 x" in row
    assert "ends, code 3" in text
    assert "any one host: node7 lost: the hosts of its copies are lost as well. Fix: set copies.count to 2." in text
