"""The rules of the code base that an import contract cannot check."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_OF_A_MERGE = re.compile(rb"^(?:<{7}|\|{7}|>{7}) |^={7}\r?$", re.MULTILINE)

PURE = [
    "ntp_plugin",
    "ntp_plugin.errors",
    "ntp_plugin.config.sections",
    "ntp_plugin.megatron",
    "ntp_plugin.planning",
    "ntp_plugin.telemetry",
    "ntp_plugin.testing",
    "ntp_plugin.planning.recovery_plan",
    "ntp_plugin.membership.protocol",
    "ntp_plugin.membership.failure_detector",
    "ntp_plugin.cli.main",
]
PROBE = """
import importlib, signal, sys, threading
before = {number: signal.getsignal(number) for number in signal.valid_signals()}
for name in sys.argv[1:]:
    importlib.import_module(name)
heavy = {"torch", "megatron", "deepspeed", "numpy"} & set(sys.modules)
assert not heavy, f"imported {heavy}"
assert threading.active_count() == 1, "an import started a thread"
assert before == {number: signal.getsignal(number) for number in signal.valid_signals()}, "an import set a handler"
"""


def test_importing_these_rooms_loads_no_torch_and_does_nothing():
    subprocess.run([sys.executable, "-c", PROBE, *PURE], check=True)


def test_the_probe_detects_a_package_that_does():
    """A negative control: torch itself."""
    done = subprocess.run([sys.executable, "-c", PROBE, "torch"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "imported" in done.stderr


@pytest.mark.parametrize("room", sorted((ROOT / "ntp_plugin").rglob("__init__.py")), ids=lambda path: path.parent.name)
def test_a_package_that_lists_some_of_its_files_lists_all(room):
    plate = ast.get_docstring(ast.parse(room.read_text())) or ""
    files = {path.name for path in room.parent.glob("*.py")} - {"__init__.py"}
    named = {name for name in files if re.search(rf"\b{re.escape(name)}\b", plate)}
    assert named in (set(), files), f"not named: {sorted(files - named)}"


def test_a_class_name_has_one_home():
    """A reader who finds a name need not ask which of two classes is meant."""
    assert shared_names({path: path.read_text() for path in (ROOT / "ntp_plugin").rglob("*.py")}) == {}


def test_a_class_name_defined_twice_is_detected():
    """A negative control."""
    found = shared_names({"a.py": "class Slot: ...", "b.py": "class Slot: ...\nclass View: ..."})
    assert found == {"Slot": ["a.py", "b.py"]}


def shared_names(sources):
    homes = {}
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path))
    return {name: paths for name, paths in homes.items() if len(paths) > 1}


def test_no_tracked_file_has_merge_conflict_marks():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no checkout")
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert [file for file in files if file.is_file() and _OF_A_MERGE.search(file.read_bytes())] == []


@pytest.mark.parametrize("mark", ["<" * 7 + " HEAD", "|" * 7 + " base", "=" * 7, ">" * 7 + " theirs"])
def test_each_merge_conflict_mark_is_detected(mark):
    assert _OF_A_MERGE.search(f"a line\n{mark}\nanother\n".encode())
    assert not _OF_A_MERGE.search(f"a line\n  {mark}\n{mark[0]}{mark}\n".encode())
