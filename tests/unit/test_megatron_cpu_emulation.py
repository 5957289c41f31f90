"""CPU emulation changes nothing while it is off, and gives a reason for each change."""

import os
import subprocess
import sys

import pytest

from ntp_plugin.errors import ConfigError
from ntp_plugin.megatron import cpu_emulation

PROBE = """
import functools, importlib, sys
import torch
from ntp_plugin.megatron import cpu_emulation

def found():
    told = {}
    for entry in (*cpu_emulation.TORCH, *cpu_emulation.DOUBLE):
        module, _, path = entry.target.partition(":")
        told[entry.target] = id(functools.reduce(getattr, path.split("."), importlib.import_module(module)))
    return told

kept = [getattr(torch.cuda, name) for name in dir(torch.cuda)]  # so that ids stay what they are
before = found()
cpu_emulation.install(cpu_emulation.wanted())
changed = [target for target, thing in found().items() if before[target] != thing]
print(len(changed), "of", len(before), torch.cuda.is_available(), torch.get_default_dtype())
"""


def probe(answer):
    environment = {**os.environ, "NTP_CPU": answer}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROBE], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_nothing_is_replaced_while_it_is_off():
    changed, _, _, available, dtype = probe("0")
    assert (changed, available, dtype) == ("0", "False", "torch.float32")


def test_everything_is_replaced_while_it_is_on():
    changed, _, all_of_them, available, dtype = probe("float64")
    assert changed == all_of_them
    assert available == "False", "only callers in Megatron see a GPU"
    assert dtype == "torch.float64"


def test_every_replacement_has_a_reason_and_is_listed_once():
    tables = (*cpu_emulation.TORCH, *cpu_emulation.MEGATRON)
    assert all(entry.why for entry in (*tables, *cpu_emulation.DOUBLE))
    assert len({entry.target for entry in tables}) == len(tables)


def test_an_unknown_value_is_refused():
    with pytest.raises(ConfigError, match="NTP_CPU = 'yes' is not known"):
        cpu_emulation.wanted({"NTP_CPU": "yes"})
