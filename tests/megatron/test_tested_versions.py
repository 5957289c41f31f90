"""A Megatron whose functions are not the tested ones is refused at the real start; an unknown version is reported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.parity.job import RECIPES
from tests.ranks.command import NTP, Command

ROOT = Path(__file__).parents[2]
ALTER = """
from megatron.training import training
train_step = training.train_step
training.train_step = lambda *args, micro_batches=1, **kwargs: train_step(*args, **kwargs)
from megatron.core.models.common.embeddings import language_model_embedding
del language_model_embedding.LanguageModelEmbedding
"""
UNKNOWN = """
import megatron.core
megatron.core.__version__ = "0.20.1"
"""
RUN = f"""
import runpy
runpy.run_path({str(RECIPES / "pretrain_gpt.py")!r}, run_name="__main__")
"""
CHECK = """
import sys
from ntp_plugin.megatron import cpu_emulation
cpu_emulation.install("1", ["--transformer-impl", "local"])
{alter}
from ntp_plugin.cli import main
sys.exit(main.main(["check", "pretrain_gpt.py", *sys.argv[1:]]))
"""
NAMED = (
    "training:train_step is (*args, micro_batches (keyword)=1, **kwargs), tested as (forward_step_func,",
    "language_model_embedding:LanguageModelEmbedding is missing",
)


@pytest.mark.short
def test_the_tables_are_those_of_the_installed_frameworks(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.signatures", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    tables = (ROOT / "ntp_plugin" / "tested_versions").glob("*.json")
    assert written == {path.name: path.read_text() for path in tables}, "make signatures"


ON_A_GPU = """
import megatron.core
from ntp_plugin.tested_versions.comparison import installed
(megatron, *_) = installed("megatron")
assert megatron.compared > 200 and not megatron.changes, megatron
"""


@pytest.mark.short
def test_they_are_those_that_a_job_on_a_gpu_finds():
    """Without CPU emulation, whose stand-ins have signatures of their own."""
    environment = {name: value for name, value in os.environ.items() if name != "NTP_CPU"} | {
        "TORCHDYNAMO_DISABLE": "1"
    }
    command = [sys.executable, "-W", "ignore", "-c", ON_A_GPU]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def start(tmp_path, alter, *more, ranks=2):
    script = tmp_path / "script.py"
    script.write_text(alter + RUN)
    words = (RECIPES / "tiny.args").read_text().split()
    command = [*NTP, "run", "--standalone", f"--nproc-per-node={ranks}", str(script), *words, *more]
    return Command(command, tmp_path / "log", NTP_CPU="1", PYTHONWARNINGS="ignore").end()


@pytest.mark.short
def test_changed_functions_are_refused_by_name_before_anything_is_built(tmp_path):
    code, output = start(tmp_path, ALTER, "--ntp-enable", ranks=1)
    assert code == 2, output
    assert "megatron-core 0.19.2 (tested: 0.19.2): " in output
    assert all(name in output for name in NAMED), output
    assert "Fix: pip install 'megatron-core==0.19.2'" in output
    assert "Traceback" not in output, output
    assert "  iteration" not in output


def test_without_the_plugin_a_changed_function_is_nobodys_concern(tmp_path):
    code, output = start(tmp_path, ALTER, "--train-iters=4")
    assert code == 0, output
    assert "iteration        4/" in output


def test_an_unknown_version_trains_after_one_line_of_warning(tmp_path):
    code, output = start(tmp_path, UNKNOWN, "--ntp-enable", "--train-iters=4")
    assert code == 0, output
    assert output.count("ntp_plugin was not tested with megatron-core 0.20.1 (tested: 0.19.2)") == 1, output
    assert "iteration        4/" in output


@pytest.mark.parametrize("alter", [ALTER, UNKNOWN], ids=["changed", "unknown"])
def test_the_check_reports_it(alter):
    words = (RECIPES / "tiny.args").read_text().split()
    command = [sys.executable, "-W", "ignore", "-c", CHECK.format(alter=alter), *words, "--ntp-enable"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = " ".join(done.stdout.split())
    if alter is UNKNOWN:
        assert done.returncode == 0, done.stderr
        assert "note ntp_plugin was not tested with megatron-core 0.20.1" in found
    else:
        assert done.returncode == 1, done.stderr
        assert "the installed version" in found
