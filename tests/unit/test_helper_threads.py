"""A failed wait on a helper thread leaves no garbage for Python's collector, which runs at any time."""

import gc

import pytest

from ntp_plugin.groups.waits import InterruptibleWaits


def test_a_failed_task_keeps_no_frames_alive():
    ended = []

    class Kept:
        def __del__(self):
            ended.append(True)

    def fail():
        raise RuntimeError("lost")

    def step(waits):
        kept = Kept()
        waits.beside(fail)
        return kept

    def attempt(waits):
        try:
            step(waits)
        except RuntimeError:
            return
        pytest.fail("it went well")

    waits = InterruptibleWaits()
    gc.disable()
    try:
        attempt(waits)
        waits._helpers.close()
        assert ended
    finally:
        gc.enable()
