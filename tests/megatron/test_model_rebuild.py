"""An optimizer that is built again; in a process that Megatron may change."""

import os
import subprocess
import sys

import pytest

PROBE = """
import gc, types, weakref
from ntp_plugin.megatron import cpu_emulation
cpu_emulation.install(cpu_emulation.wanted())
import torch
from ntp_plugin.megatron.live.model_rebuild import ModelRebuild

model = torch.nn.Linear(2, 2)
rebuild = ModelRebuild(None)
rebuild.chunks, rebuild.optimizer = [model], types.SimpleNamespace(chained_optimizers=[])
model.weight.main_param = torch.zeros(4)
old = weakref.ref(model.weight.main_param)

def build():
    gc.collect()
    assert old() is None, "both would be in memory together"
    return types.SimpleNamespace(chained_optimizers=["new"])

rebuild._build_optimizer = build
rebuild.build_optimizer_again()
assert rebuild.optimizer.chained_optimizers == ["new"]
"""


@pytest.mark.short
def test_the_old_float32_shards_are_freed_before_an_optimizer_is_built_again():
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=os.environ | {"NTP_CPU": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
