"""How the log of a job that torchrun restarts is evaluated."""

import types

import pytest

from benchmarks import megatron_restart

LINE = " [2026-11-25 02:03:11.000000] iteration        7/    1000 | consumed samples:           28 |\n"


@pytest.mark.parametrize("before", ["", "WARNING: of another process, whose line has not ended yet"])
def test_an_iteration_is_found_where_another_process_writes_into_the_line(before):
    job = types.SimpleNamespace(stdout=["iteration 9 is no line of the log\n", before + LINE], poll=lambda: None)
    log = megatron_restart._Log(job)
    assert log.wait_for(7) > 0
    assert log.iterations == [7]
