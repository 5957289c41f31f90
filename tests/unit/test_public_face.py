"""The public API: it exists, it is typed, and its examples run."""

import ast
import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ntp_plugin
from ntp_plugin.telemetry import Began, Committed, Ended, EventWriter, RankLost, Recovered, events_file

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
PACKAGE = ROOT / "ntp_plugin"
MODULES = ["", ".errors", ".megatron", ".planning", ".telemetry", ".testing"]
"""Public modules; importing that of DeepSpeed switches it on, so tests/deepspeed has it."""
WITH_EXAMPLES = ["ntp_plugin.errors", "ntp_plugin.planning.job_plan", "ntp_plugin.telemetry.printable"]


def module(name):
    return importlib.import_module(f"ntp_plugin{name}")


def lazy_homes(path):
    """Name -> home, as a type checker sees it."""
    checked = [
        part
        for part in ast.parse(path.read_text()).body
        if isinstance(part, ast.If) and ast.unparse(part.test) == "TYPE_CHECKING"
    ]
    return {
        alias.name: line.module
        for part in checked
        for line in part.body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_there_and_listed(name):
    found = module(name)
    assert found.__all__
    for public in found.__all__:
        assert getattr(found, public) is not None
        assert public in dir(found)
    namespace = {}
    exec(f"from {found.__name__} import *", namespace)
    assert set(found.__all__) <= set(namespace)


@pytest.mark.parametrize("name", ["", ".planning", ".testing"])
def test_a_type_checker_sees_the_names_that_are_there(name):
    found = module(name)
    homes = lazy_homes(Path(found.__file__))
    assert set(homes) == set(found.__all__) - {"__version__"}
    for public, home in homes.items():
        assert getattr(found, public) is getattr(importlib.import_module(home), public)


def test_a_name_that_is_not_public_is_no_attribute():
    with pytest.raises(AttributeError, match="module 'ntp_plugin' has no attribute 'elastic_jobs'"):
        _ = ntp_plugin.elastic_jobs


def test_the_package_is_marked_as_typed():
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_of_docstrings_run(name):
    tried = doctest.testmod(importlib.import_module(name))
    assert tried.attempted
    assert not tried.failed


def test_every_docstring_example_is_run():
    written = [path for path in PACKAGE.rglob("*.py") if re.search(r"^ +>>> ", path.read_text(), re.MULTILINE)]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in written]
    assert sorted(names) == WITH_EXAMPLES


# ---------------------------------------------------------------- the examples

OF_A_USER = "[mypy]\nstrict = true\n[mypy-deepspeed.*,megatron.*]\nignore_missing_imports = true\n"


def type_checked(paths, tmp_path):
    """Type-check with a user's configuration, not with ours."""
    config = tmp_path / "mypy.ini"
    config.write_text(OF_A_USER)
    words = ["-m", "mypy", "--strict", f"--config-file={config}", f"--cache-dir={ROOT / '.mypy_cache' / 'of-a-user'}"]
    return subprocess.run(
        [sys.executable, *words, *map(str, paths)],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_examples_pass_mypy_strict_and_a_wrong_one_does_not(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from ntp_plugin import plan, elastic_jobs\n\nplan(7)\n")
    done = type_checked([*sorted(EXAMPLES.glob("*.py")), wrong], tmp_path)
    complaints = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert [line for line in complaints if not line.startswith("wrong.py")] == [], done.stdout
    assert 'has no attribute "elastic_jobs"' in complaints[0]
    assert 'incompatible type "int"; expected "Job"' in complaints[1]


def run(*words, **environment):
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run([sys.executable, *words], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example_of_a_plan_runs():
    output = run(str(EXAMPLES / "plan_a_loss.py"))
    assert "degraded replicas (3,), dropped (), idle GPUs 0" in output
    assert "r3.s1: TP 8 -> 7" in output
    assert "lost in both of two replicas: state of r0.s1.t5 is held by no living slot" in output


def test_the_example_of_a_record_runs(tmp_path):
    event_writer = EventWriter(events_file(tmp_path), "r0.s0.t0")
    settings = {"number": 0, "pid": 1, "joiner": False, "replicas": 2, "stages": 1, "tp": 1}
    recovered = {"epoch": 1, "seconds": 0.25, "back": [], "widths": [[1], [0]], "micro_batches": [2, 0]}
    for event in (
        Began(**settings, micro_batches=[1, 1]),
        Committed(step=1, epoch=0, seconds=0.1, losses={}, samples=[]),
        RankLost(number=1, pid=2, kind="dead", reason="exited with -9"),
        Recovered(**recovered, lost=["r1.s0.t0"]),
        Ended(),
    ):
        event_writer.write(event)
    event_writer.close()
    output = run(str(EXAMPLES / "read_a_record.py"), str(tmp_path))
    assert output.splitlines() == [
        "rank 1 lost: exited with -9",
        "r0.s0.t0 went on after 0.25 s, without r1.s0.t0",
        "1 steps committed",
    ]


@pytest.mark.parametrize(("name", "ranks"), [("plain_loop", 2), ("tensor_parallel_loop", 4)])
def test_the_example_of_a_loop_runs(name, ranks):
    words = ["-m", "ntp_plugin.cli.main", "run", "--standalone", f"--nproc-per-node={ranks}"]
    output = run(*words, str(EXAMPLES / f"{name}.py"), STEPS="5")
    assert f"members {tuple(range(ranks))}" in output


def test_the_example_of_a_test_passes():
    assert "1 passed" in run(
        "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, "-q", str(EXAMPLES / "test_my_loop.py")
    )
