"""The laws of the house that an import contract cannot see."""

import subprocess
import sys

PURE = [
    "ntp_plugin",
    "ntp_plugin.errors",
    "ntp_plugin.config.sections",
    "ntp_plugin.telemetry",
    "ntp_plugin.planning.recovery_plan",
    "ntp_plugin.cli.main",
]
PROBE = """
import importlib, signal, sys, threading
before = {number: signal.getsignal(number) for number in signal.valid_signals()}
for name in sys.argv[1:]:
    importlib.import_module(name)
heavy = {"torch", "megatron", "deepspeed", "numpy"} & set(sys.modules)
assert not heavy, f"imported {heavy}"
assert threading.active_count() == 1, "an import started a thread"
assert before == {number: signal.getsignal(number) for number in signal.valid_signals()}, "an import set a handler"
"""


def test_importing_these_rooms_loads_no_torch_and_does_nothing():
    subprocess.run([sys.executable, "-c", PROBE, *PURE], check=True)


def test_the_probe_notices_a_room_that_does():
    """A negative control: torch itself."""
    done = subprocess.run([sys.executable, "-c", PROBE, "torch"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "imported" in done.stderr
