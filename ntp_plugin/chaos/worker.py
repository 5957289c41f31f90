"""Inside a worker process: inject an ordered fault at its fault point.

    python -m ntp_plugin.chaos.worker ORDERS script.py ARGUMENTS      as `ntp run --ntp-chaos` starts it

The script runs unchanged. Once it has imported a framework, and the framework has a job, the framework's adapter
reports every fault point to this process.
"""

import functools
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ntp_plugin.chaos.faults import OrderedFault, Pending
from ntp_plugin.launch.script import after_import, run
from ntp_plugin.recovery.fault_points import ALL_DONE, Weight, Weights
from ntp_plugin.telemetry import EventWriter, FaultInjected, Weighed
from ntp_plugin.testing import harm

_ADAPTERS = {
    "megatron.training.arguments": "ntp_plugin.megatron.live.fault_points",
    "deepspeed": "ntp_plugin.deepspeed.fault_points",
}


class FaultyWorker:
    """This process: it injects the faults that are ordered for its slot."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending
        self._slot = ""
        self._weights: Weights = tuple
        self._event_writer = EventWriter(None, "")
        self._slow: dict[str, _Slowness] = {}
        """By fault point."""

    def is_here(self, slot: str, weights: Weights) -> None:
        """Set the slot and the weights, once the framework has a job."""
        self._slot, self._weights = slot, weights
        self._event_writer = EventWriter(os.environ.get("NTP_EVENTS"), slot)

    def reached(self, fault_point: str, step: int | None = None, *, epoch: int | None = None) -> None:
        """Inject the faults that are ordered for this fault point; at the end record the digests of the weights."""
        if fault_point == ALL_DONE:
            self._event_writer.write(weighed(self._weights()))
            return
        if fault_point in self._slow:
            self._slow[fault_point].wait()
        for fault in self._pending.take(self._slot, fault_point, step, epoch):
            self._event_writer.write(
                FaultInjected(
                    fault=fault.name, what=fault.what, whom=self._slot, fault_point=fault_point, step=step or 0
                )
            )
            self._inject(fault, fault_point)

    def _inject(self, fault: OrderedFault, fault_point: str) -> None:
        ways: dict[str, Callable[[], object]] = {
            "kill": harm.kill,
            "stop": harm.stop,
            "segfault": harm.segfault,
            "hang": harm.hang,
            "lock": harm.hold_lock,
            "exception": functools.partial(_fail, fault.name),
            "memory": harm.run_out_of_memory,
            "exit": lambda: os._exit(0),
            "slow": functools.partial(self._slow.__setitem__, fault_point, _Slowness(fault)),
            "disk": functools.partial(harm.fill_disk, fault.seconds),
            "clock": functools.partial(harm.jump_clock, fault.seconds),
            "weight": functools.partial(self._spoil_weight, fault),
            "copy": functools.partial(self._spoil_copy, fault),
        }
        ways[fault.what]()

    def _spoil_weight(self, fault: OrderedFault) -> None:
        harm.spoil_weight([weight.values for weight in self._weights()], seed=_seed(fault))

    def _spoil_copy(self, fault: OrderedFault) -> None:
        if folder := os.environ.get("NTP_COPIES"):
            harm.spoil_copy(Path(folder), int(os.environ["RANK"]), seed=_seed(fault))


class _Slowness:
    """Slows this thread down, in proportion to its CPU time: waiting for other ranks does not count."""

    def __init__(self, fault: OrderedFault) -> None:
        self._seconds, self._more = fault.seconds, fault.factor - 1.0
        self._until = time.thread_time()

    def wait(self) -> None:
        """Sleep for the extra time."""
        time.sleep(self._seconds + self._more * (time.thread_time() - self._until))
        self._until = time.thread_time()


def weighed(weights: Iterable[Weight]) -> Weighed:
    """Return the event with the digests of some weights."""
    from ntp_plugin.copies.sketch import sketch  # noqa: PLC0415  (a framework has imported torch already)

    cut, alike, shared = list[Weight](), list[Weight](), list[Weight]()
    for weight in weights:
        (shared if weight.shared_by else cut if weight.is_cut else alike).append(weight)
    sums = [sketch((weight.tensor_slice, weight.values) for weight in some) for some in (cut, alike, shared)]
    values = [sum(weight.tensor_slice.size for weight in some) for some in (cut, alike, shared)]
    return Weighed(
        cut=sums[0],
        cut_values=values[0],
        alike=sums[1],
        alike_values=values[1],
        shared=sums[2] if shared else [],
        shared_values=values[2],
        shared_by=shared[0].shared_by if shared else "",
    )


def _seed(fault: OrderedFault) -> int:
    return int.from_bytes(fault.name.encode()[:8], "big")


def _fail(name: str) -> None:
    raise ValueError(f"fault {name}: an unexpected error")


def main(words: Sequence[str]) -> None:
    """Have the frameworks report their fault points, and run the script."""
    victim = FaultyWorker(Pending(Path(words[0])))
    for framework, adapter in _ADAPTERS.items():
        after_import(framework, functools.partial(_report_fault_points, adapter, victim))
    run(words[1:])


def _report_fault_points(adapter: str, victim: FaultyWorker) -> None:
    importlib.import_module(adapter).whenever_there_is_a_job(victim.reached, victim.is_here)


if __name__ == "__main__":
    main(sys.argv[1:])
