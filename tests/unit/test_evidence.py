"""What a `make show-<topic>` prints is what it has found."""

import json

import pytest

from benchmarks import evidence


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def test_rows_of_other_values_stand_in_their_own_columns(capsys, tmp_path):
    rows = [{"what": "one", "explained": 7}, {"what": "other", "added": 9}]
    assert evidence.show("topic", holds=True, seed=1, rows=rows) == 0
    lines = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in line] for line in lines] == [["one", "7", ""], ["other", "", "9"]]
    assert json.loads((tmp_path / "build/show/topic.json").read_text())["rows"] == rows


def test_rows_of_many_values_are_told_one_by_one(capsys):
    row = {f"value {number}": number for number in range(20)}
    assert evidence.show("topic", holds=False, seed=1, rows=[row]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert ", ".join(f"{name} {value}" for name, value in row.items()) in told
    assert "topic: DOES NOT HOLD" in told
