"""`ntp check` as a user types it, where no framework is needed: one clear line, and code 2."""

import pytest

from ntp_plugin.cli.main import main

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
