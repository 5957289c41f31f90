"""The page of all flags is what the installed Megatron's parser and the tables say, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "megatron-flags.md"
PROBE = """
import json, sys
from ntp_plugin.megatron import flag_table, recipe_check
from ntp_plugin.megatron.degraded_changes import CHANGES

parser = recipe_check.parser()
listed = flag_table.page(parser)
refused = {row.flag.split()[0] for row in (*flag_table.TABLE, *flag_table.LIVE)}
changed = {row.flag for row in CHANGES}
flags = [flag_table.flag_of(action) for action in parser._actions]
idle = [prefix for family in flag_table.FAMILIES for prefix in family.prefixes
        if not any(flag.startswith(prefix) for flag in flags)]
flag_table.TABLE = tuple(row for row in flag_table.TABLE if row.flag != "--moe-use-upcycling")
print(json.dumps({
    "page": listed,
    "refused": sorted(refused),
    "changed": sorted(changed),
    "unknown": sorted((changed | flag_table.OLD_NAMES | set(flag_table.CONDITIONS)) - set(flags)),
    "idle": idle,
    "without": flag_table.page(parser),
}))
"""


@pytest.fixture(scope="module")
def found():
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROBE],
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def row_of(page, flag):
    (row,) = (line for line in page.splitlines() if line.startswith("|") and f"`{flag}`" in line.split("|")[1])
    return [cell.strip() for cell in row.split("|")[2:4]]


@pytest.mark.short
def test_the_committed_page_is_the_generated_one(found):
    assert PAGE.read_text() == found["page"], "make megatron-flags"


@pytest.mark.short
def test_every_refused_or_changed_flag_has_a_row_that_says_so(found):
    for flag in found["refused"]:
        status, text = row_of(found["page"], flag)
        assert status == "unsupported" or "nsupported" in text, flag
    for flag in set(found["changed"]) - set(found["refused"]):
        assert row_of(found["page"], flag)[0] == "works, and changes", flag


@pytest.mark.short
def test_rows_of_the_tables_are_about_flags_that_there_are(found):
    assert found["unknown"] == found["idle"] == []


def test_a_refusal_that_is_removed_changes_the_page(found):
    assert row_of(found["page"], "--moe-use-upcycling")[0] == "unsupported"
    assert row_of(found["page"], "--moe-upcycling-granularity") == ["unsupported", "goes with `--moe-use-upcycling`"]
    assert row_of(found["without"], "--moe-use-upcycling") == ["works", ""]
    assert row_of(found["without"], "--moe-upcycling-granularity") == ["works", ""]


def test_values_that_are_refused_are_named(found):
    assert row_of(found["page"], "--softmax-type")[1].startswith("Unsupported: `learnable`: ")
