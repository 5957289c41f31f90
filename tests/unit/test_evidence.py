"""A `make show-<topic>` prints what it has found."""

import json
import subprocess

import pytest

from benchmarks import evidence


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def test_rows_with_other_keys_have_their_own_columns(capsys, tmp_path):
    rows = [{"what": "one", "explained": 7}, {"what": "other", "added": 9}]
    assert evidence.show("topic", holds=True, seed=1, rows=rows) == 0
    lines = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in line] for line in lines] == [["one", "7", ""], ["other", "", "9"]]
    assert json.loads((tmp_path / "build/show/topic.json").read_text())["rows"] == rows


def test_rows_of_many_values_are_printed_one_by_one(capsys):
    row = {f"value {number}": number for number in range(20)}
    assert evidence.show("topic", holds=False, seed=1, rows=[row]) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert ", ".join(f"{name} {value}" for name, value in row.items()) in output
    assert "topic: DOES NOT HOLD" in output


@pytest.mark.parametrize(
    ("asked", "command"),
    [
        ({}, "make show-topic"),
        ({"ROWS": "busy", "SCALE": "ci"}, "SCALE=ci ROWS=busy make show-topic"),
        ({"ROWS": ""}, "make show-topic"),
    ],
)
def test_the_command_is_the_one_that_was_typed(monkeypatch, tmp_path, asked, command):
    for name in ("SCALE", "ROWS", "FRAMEWORK", "CYCLES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    evidence.show("topic", holds=True, seed=1, rows=[])
    assert json.loads((tmp_path / "build/show/topic.json").read_text())["command"] == command


def test_the_same_code_is_identified_by_its_commit(monkeypatch, tmp_path):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", *words], check=True, capture_output=True)

    def write(name, text):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def commit():
        git("add", "."), git("commit", "-m", "more")
        return evidence.trees("code", "benchmarks")

    monkeypatch.setattr(evidence, "__file__", str(tmp_path / "benchmarks" / "evidence.py"))
    git("init")
    write("code/one.py", "1"), write("benchmarks/two.py", "2"), write("docs/page.md", "3")
    first = commit()
    assert first
    write("docs/page.md", "4")
    assert evidence.trees("code", "benchmarks") == commit() == first
    write("code/new.py", "5")
    assert evidence.trees("code", "benchmarks") is None
    assert commit() not in (None, first)


def test_code_outside_a_repository_has_no_identity(monkeypatch, tmp_path):
    monkeypatch.setattr(evidence, "__file__", str(tmp_path / "benchmarks" / "evidence.py"))
    assert evidence.trees(".") is None


def test_rows_of_an_earlier_version_are_skipped(tmp_path):
    (tmp_path / "kept").write_text('{"case": 1, "commit": "abc"}\n{"case": 1, "turn": 0}\n')
    kept = evidence.Sittings(tmp_path / "kept")
    assert kept.find(case=1, turn=0) == {"case": 1, "turn": 0}
    assert kept.find(case=1, turn=1) is None
