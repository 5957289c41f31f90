"""`ntp simulate` as a user meets it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ntp_plugin.cli.main import main
from ntp_plugin.simulator.protocol import search as searching
from ntp_plugin.simulator.protocol.laws import Violation

RECIPES = Path(__file__).parents[2] / "recipes/simulate"
FLAGS = [
    *("--tp", "8", "--pp", "2", "--dp", "8", "--layers", "16", "--hidden", "4096", "--heads", "32", "--ffn", "16384"),
    *("--vocab", "32000", "--global-batch", "128", "--days", "5", "--failed-up-to", "0.01", "--draws", "3"),
    *("--factor", "50"),
]
PURE = """
import sys
import ntp_plugin.simulator.report, ntp_plugin.simulator.protocol.search, ntp_plugin.planning.actions
heavy = {"torch", "megatron", "deepspeed", "matplotlib"} & set(sys.modules)
assert not heavy, f"imported {heavy}"
"""


def run(capsys, *words):
    code = main(["simulate", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_simulator_imports_no_torch():
    subprocess.run([sys.executable, "-c", PURE], check=True)
    spoilt = subprocess.run(
        [sys.executable, "-c", "import torch\n" + PURE], capture_output=True, text=True, check=False
    )
    assert "imported" in spoilt.stderr


def test_a_run_prints_tables_and_is_reproducible_by_seed(capsys):
    code, once, err = run(capsys, *FLAGS, "--seed", "3")
    assert (code, err) == (0, "")
    for word in ("dp-drop", "ntp-pw", "chooser", "goodput", "failed GPUs", "128 GPUs"):
        assert word in once
    assert run(capsys, *FLAGS, "--seed", "3")[1] == once
    assert run(capsys, *FLAGS, "--seed", "4")[1] != once


def test_json_has_all_of_it(capsys):
    report = json.loads(run(capsys, *FLAGS, "--json")[1])
    assert report["gpus"] == 128
    assert [course["policy"] for course in report["courses"]] == ["dp-drop", "ntp", "ntp-strict", "ntp-pw", "chooser"]
    assert len(report["losses"]) == 8 * 4
    assert all(0 <= course["goodput"] <= 1 for course in report["courses"])


def test_a_picture(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "loss.png"
    assert run(capsys, *FLAGS, "--plot", str(path))[0] == 0
    assert path.read_bytes()[:4] == b"\x89PNG"
    code, _, err = run(capsys, *FLAGS, "--plot", str(tmp_path / "loss.doc"))
    assert code == 2 and "cannot be drawn" in err


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_runs(capsys, recipe):
    code, out, err = run(capsys, "--config", str(recipe), "--draws", "1", "--days", "2")
    assert (code, err) == (0, "")
    assert "assumed" in out


def test_a_trace_names_its_assumption(capsys, tmp_path):
    path = tmp_path / "outages.csv"
    path.write_text("domain,start,end\nnode1,1,2\nnode2,2,4\n")
    flags = [*FLAGS, "--trace", str(path), "--trace-domains", "8"]
    code, _, err = run(capsys, *flags)
    assert code == 2 and "say with trace_gpus how many GPUs each outage takes" in err
    code, out, _ = run(capsys, *flags, "--trace-gpus", "4")
    assert code == 0
    assert "takes 4 GPUs of a domain" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policies", "hope"], "'hope' is no policy"),
        (["--machine", "v100"], "machine = 'v100' is not known"),
        (["--blast-gpus", "9"], "blast_gpus = 9 is above tp = 8"),
        (["--days", "0", "--failed-up-to", "0"], "nothing to simulate"),
        (["--spares-needed"], "set packed and days"),
        (["--mode", "hard"], "choose from shrink, strict, fixed"),
        (["--forbid", "sleep"], "'sleep' is no action"),
        (["--search", "many"], "argument --search: 'many' is not a whole number from 1"),
        (["--planted", "decide-early"], "--planted needs --search or --replay"),
        (["--replay", "3", "--planted", "no"], "'no' is no planted bug"),
        (["--trace", "none.csv", "--trace-gpus", "1"], "none.csv cannot be read"),
        (["--layers", "1"], "do not fill pp = 2 stages"),
    ],
)
def test_an_error_is_one_line(capsys, words, message):
    code, _, err = run(capsys, *FLAGS, *words)
    assert code == 2
    assert err.startswith("ntp: ") and err.count("\n") == 1
    assert message in err


def test_a_search_reports_its_findings_and_how_to_reproduce_them(capsys):
    code, out, _ = run(capsys, "--search", "50")
    assert code == 0 and "50 schedules" in out and "no law is broken" in out
    code, out, _ = run(capsys, "--search", "2000", "--planted", "stale-epoch")
    assert code == 1
    words = out.strip().splitlines()[-1].split("ntp simulate ")[1].split()
    code, again, _ = run(capsys, *words)
    assert (code, again) == (1, out)
    assert run(capsys, "--replay", words[1])[0] == 0


def test_a_violated_invariant_fails_the_search(capsys, monkeypatch):
    def broken(seed, planted=None):
        if seed == 7:
            raise Violation("somebody waits for ever")
        return sound(seed, planted)

    sound = searching.replay
    monkeypatch.setattr(searching, "replay", broken)
    code, out, _ = run(capsys, "--search", "20")
    assert code == 1
    assert "seed 7: somebody waits for ever" in out and "ntp simulate --replay 7" in out
