"""`ntp_plugin.megatron.enable`: at the start of a script, twice, and too late.

Megatron here is a few lines, so that a script takes no longer than importing torch; tests/megatron has the real one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEGATRON = {
    "__init__.py": "",
    "core/__init__.py": "",
    "training/__init__.py": "from megatron.training.training import pretrain",
    "training/arguments.py": """
import argparse
def add_megatron_arguments(parser): return parser
def validate_args(args, *rest): return args
def parse(words=()):
    from megatron.training import global_vars
    args = validate_args(add_megatron_arguments(argparse.ArgumentParser()).parse_args(words))
    global_vars._GLOBAL_ARGS = args
    return args
""",
    "training/global_vars.py": "_GLOBAL_ARGS = None",
    "training/training.py": "def pretrain(): print('trained')",
}
ENABLE = "from ntp_plugin.megatron import enable; enable()\n"
PARSE = "from megatron.training.arguments import parse; print('route', parse(['--ntp-route=direct']).key_ntp_route)\n"
PRETRAIN = "from megatron.training import pretrain; pretrain()\n"


@pytest.fixture
def script(tmp_path):
    for name, text in MEGATRON.items():
        path = tmp_path / "megatron" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(text, *before):
        path = tmp_path / "script.py"
        path.write_text(text)
        environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
        environment.pop("NTP_CPU", None)
        words = [sys.executable, *before, str(path)]
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)

    return run


@pytest.mark.parametrize("before", [(), ("-m", "ntp_plugin.launch.script")], ids=["alone", "as ntp run starts it"])
def test_repeated_calls_add_the_flags_once(script, before):
    done = script(ENABLE + ENABLE + PARSE + PRETRAIN, *before)
    assert (done.returncode, done.stdout) == (0, "route direct\ntrained\n"), done.stderr


@pytest.mark.parametrize(
    ("first", "what"),
    [
        ("from megatron.training.arguments import parse; parse()\n", "Megatron has parsed its arguments"),
        ("from megatron.training import pretrain\n", "pretrain is imported already, by __main__"),
        (
            "import torch.distributed as dist\n"
            "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n",
            "the process group is made",
        ),
        (
            "import megatron.core, os; os.environ['NTP_CPU'] = '1'\n",
            "Megatron is imported already, and NTP_CPU is set",
        ),
    ],
)
def test_a_late_call_is_one_line(script, first, what):
    done = script(first + ENABLE)
    assert done.returncode == 2, done.stderr
    assert f"ntp: ntp_plugin.megatron.enable() is called too late: {what}. Fix: make it the first" in done.stderr
    assert "Traceback" not in done.stderr
