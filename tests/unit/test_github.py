"""The files for the repository's host: the workflow, the templates of issues and of a pull request."""

import os
import re
from pathlib import Path

import pytest
import yaml

from ntp_plugin.cli.main import main

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
NTP_COMMANDS = {"chaos", "check", "copies", "plan", "report", "run", "simulate", "status", "store"}
_TARGET = re.compile(r"^([\w-]+):", re.MULTILINE)
_MAKE = re.compile(r"(?:^|`|&& |=\w+ )make ([\w-]+)", re.MULTILINE)
_NTP = re.compile(r"`ntp (\w[\w-]*)")
_FILE = re.compile(r"(?<![\w./])((?:docs/[\w./-]+|\.ci/\w+|[A-Z_]{6,}\.md)\b)")


def steps_of(workflow):
    return [step for job in yaml.safe_load(workflow)["jobs"].values() for step in job["steps"]]


def unknown_in(text):
    """Commands and files of this repository that a text names and that are not there."""
    targets = set(_TARGET.findall((ROOT / "Makefile").read_text()))
    return (
        [f"make {target}" for target in _MAKE.findall(text) if target not in targets and not target.endswith("-")]
        + [f"ntp {command}" for command in _NTP.findall(text) if command not in NTP_COMMANDS]
        + [file for file in _FILE.findall(text) if not (ROOT / file).exists()]
    )


def needless_or_missing_in(form):
    """Errors that keep a host from showing an issue form."""
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    ids = [part["id"] for part in fields]
    kinds = {part["type"] for part in form["body"]}
    return (
        [key for key in ("name", "description", "body") if not form.get(key)]
        + sorted(kinds - {"markdown", "input", "textarea", "dropdown", "checkboxes"})
        + [name for name in ids if ids.count(name) > 1]
        + [part["id"] for part in fields if not part["attributes"].get("label")]
    )


def test_the_workflow_runs_the_local_checks_on_python_3_12():
    steps = steps_of((GITHUB / "workflows" / "ci.yml").read_text())
    assert [step["run"] for step in steps if "run" in step] == ["bash .ci/setup", ".ci/run"]
    assert [step["with"]["python-version"] for step in steps if "setup-python" in step.get("uses", "")] == ["3.12"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_only_read(workflow):
    assert yaml.safe_load(workflow.read_text())["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.name)
def test_an_issue_form_can_be_shown(form):
    assert needless_or_missing_in(yaml.safe_load(form.read_text())) == []


def test_an_invalid_issue_form_is_detected():
    twice = {"type": "textarea", "id": "a", "attributes": {"label": "A"}}
    form = {"name": "N", "description": "", "body": [twice, {**twice, "type": "essay"}]}
    assert needless_or_missing_in(form) == ["description", "essay", "a", "a"]


@pytest.mark.parametrize(
    "file",
    [*WORKFLOWS, *FORMS, GITHUB / "pull_request_template.md", ROOT / "CODE_OF_CONDUCT.md", ROOT / "CONTRIBUTING.md"],
    ids=lambda path: path.name,
)
def test_named_commands_and_files_exist(file):
    assert unknown_in(file.read_text()) == []


def test_an_unknown_command_is_detected():
    assert unknown_in("`make chekc`, `ntp stauts RUN`, docs/none.md, .ci/recovery, ABSENT.md") == [
        "make chekc",
        "ntp stauts",
        "docs/none.md",
        ".ci/recovery",
        "ABSENT.md",
    ]


def test_the_commands_are_those_of_ntp(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert set(re.findall(r"^    ([a-z]+) ", capsys.readouterr().out, re.MULTILINE)) == NTP_COMMANDS
