"""The glossary holds in code, tests, documents and recipes."""

from pathlib import Path

import pytest

from tests.unit import words

ROOT = Path(__file__).resolve().parents[2]
AREAS = ("ntp_plugin", "benchmarks", "tests", "docs", "recipes", "README.md", "CONTRIBUTING.md", "SECURITY.md")

IN_RECORDS = {
    ("benchmarks/overhead.py", "whole layout"),
    ("benchmarks/recipes.py", "strikes"),
    ("benchmarks/recovery.py", "break out"),
    ("benchmarks/soak.py", "pieces"),
    ("tests/unit/test_recovery_benchmark.py", "break out"),
}
"""Keys and values of records under docs/results, which keep the names that they were written with."""


def files(area):
    root = ROOT / area
    found = [root] if root.is_file() else [path for end in ("py", "md", "toml") for path in root.rglob(f"*.{end}")]
    return [path for path in found if path.name not in ("words.py", "test_words.py") and "results" not in path.parts]


@pytest.mark.parametrize("area", AREAS)
def test_nobody_uses_a_word_of_the_old_dialect(area):
    found = [
        finding
        for path in files(area)
        for finding in words.findings(path)
        if (str(path.relative_to(ROOT)), finding.found) not in IN_RECORDS
    ]
    assert files(area), "there is something to look at"
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("x.py", "def newcomer_of(view):\n    return view\n", "newcomer_of"),
        ("x.py", "told = [1]\n", "told"),
        ("x.py", "class HurtReplica:\n    pass\n", "HurtReplica"),
        ("x.py", "# all stand on one step\n", "stand on"),
        ("x.py", "x = f'{1} is stuck'\n", "stuck"),
        ("x.py", '"""Of those who are left."""\n', "Of those who are left."),
        ("x.md", "A whole replica goes on.\n", "whole replica"),
    ],
)
def test_a_word_of_the_old_dialect_is_noticed(tmp_path, name, source, expected):
    path = tmp_path / name
    path.write_text(source)
    assert [finding.found for finding in words.findings(path)] == [expected]


def test_field_words_that_look_alike_are_not_noticed(tmp_path):
    path = tmp_path / "x.py"
    path.write_text(
        "import os\n\nheartbeat, bellman, twinned = 1, 2, 3\nfor _ in os.walk('.'):  # `strike` in code\n    pass\n"
    )
    assert words.findings(path) == []
