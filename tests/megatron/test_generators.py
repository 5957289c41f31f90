"""States of generators are stored and restored, Megatron's own as well; in a process that Megatron may change."""

import os
import subprocess
import sys

import pytest

PROBE = """
import json, random
from ntp_plugin.megatron import cpu_emulation
cpu_emulation.install(cpu_emulation.wanted())
import numpy as np, torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from ntp_plugin.megatron.live import generators

tracker = get_cuda_rng_tracker()
tracker.add("model-parallel-rng", 7)

def draw():
    with tracker.fork("model-parallel-rng"):
        own = torch.rand(3).tolist()
    return own, torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()

draw()
stored = json.loads(json.dumps(generators.states(), default=bytes.hex))  # as a manifest has it
first, second = draw(), draw()
generators.put_back(stored)
assert draw() == first != second
assert draw() == second
assert generators.names() == ["drawn model-parallel-rng"]
"""


@pytest.mark.short
def test_restored_generators_draw_the_same_numbers():
    environment = {**os.environ, "NTP_CPU": "1", "TORCHDYNAMO_DISABLE": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROBE], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
