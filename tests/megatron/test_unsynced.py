"""Remains of an interrupted step log nothing in a later one; in a process that Megatron may change."""

import os
import subprocess
import sys

import pytest

PROBE = """
import gc, types
from ntp_plugin.megatron import cpu_emulation
cpu_emulation.install(cpu_emulation.wanted())
from megatron.core.distributed import DistributedDataParallel
from ntp_plugin.megatron.live.unsynced import Unsynced

def broken_off(no_sync):
    group = types.SimpleNamespace(is_last_microbatch=True)
    entered = no_sync(types.SimpleNamespace(bucket_groups=[group], expert_parallel_bucket_groups=[]))
    entered.__enter__()
    assert not group.is_last_microbatch
    del entered
    gc.collect()
    return group.is_last_microbatch

assert not broken_off(Unsynced)
assert broken_off(DistributedDataParallel.no_sync), "Megatron's own does, which is why there is another"

group = types.SimpleNamespace(is_last_microbatch=True)
with Unsynced(types.SimpleNamespace(bucket_groups=[group], expert_parallel_bucket_groups=[])):
    assert not group.is_last_microbatch
assert group.is_last_microbatch
"""


@pytest.mark.short
def test_an_interrupted_schedule_logs_nothing_later():
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=os.environ | {"NTP_CPU": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
