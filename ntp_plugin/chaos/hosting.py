"""Run the job of a campaign on this machine, or on several emulated ones (`testing/machines.py`).

With several machines each has its `ntp run`, and one more hosts the job's store, so that any of them may be lost. They
share one folder, so the record is complete; the exit code of a machine that a fault has taken does not count.
"""

import contextlib
import functools
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ntp_plugin.chaos.faults import CUT, NODE, STORE, SUPERVISOR, OrderedFault
from ntp_plugin.chaos.recipe import RUN, JobSpec
from ntp_plugin.testing.machines import DEVICE, Machines

_NTP = (sys.executable, "-m", "ntp_plugin.cli.main")
_PORT = 29400
type Undo = Callable[[], None]
type Action = Callable[[], Undo | None]
"""Injects a fault; returns what undoes it, if it is temporary."""
_END_S = 20.0
"""Time for a job to end after SIGTERM, before SIGKILL."""


class OneMachine:
    """This machine, with a single `ntp run`."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    @property
    def code(self) -> int:
        """The job's exit code."""
        assert self._process.returncode is not None, "it is over"
        return self._process.returncode

    def way_to(self, fault: OrderedFault, _pid: int | None) -> Action | None:
        """Return what injects a fault that comes from outside and is no signal to a worker."""
        assert fault.what == SUPERVISOR, "all others need several hosts"
        return self._process.kill


class SeveralMachines:
    """Emulated machines: one `ntp run` on each, and the store on the last."""

    def __init__(
        self, machines: Machines, processes: Mapping[int, "subprocess.Popen[bytes]"], store: "subprocess.Popen[bytes]"
    ) -> None:
        self._machines, self._processes, self._store = machines, processes, store
        self._taken: set[int] = set()
        """Machines that a fault has taken from the job."""

    @property
    def is_over(self) -> bool:
        return all(process.poll() is not None for at, process in self._processes.items() if at not in self._taken)

    @property
    def code(self) -> int:
        """The first exit code that is not 0, on machines that no fault has taken."""
        codes = [process.returncode for at, process in self._processes.items() if at not in self._taken]
        return next((code for code in codes if code), 0)

    def way_to(self, fault: OrderedFault, pid: int | None) -> Action | None:
        """Return what injects a fault from outside that is no signal to a worker; None if the process has ended."""
        if fault.what == STORE:
            return self._store.kill
        at = next((at for at in self._processes if pid in self._machines.pids(at)), None)
        return None if at is None else functools.partial(self._inject, fault, at)

    def _inject(self, fault: OrderedFault, at: int) -> Undo | None:
        if fault.what in (NODE, CUT):
            self._taken.add(at)
        match fault.what:
            case "node":
                self._machines.kill(at)
            case "cut":
                self._machines.cut_off(at)
            case "blink":
                self._machines.cut_off(at)
                return functools.partial(self._machines.bring_back, at)
            case "delay":
                self._machines.delay(at, fault.seconds)
            case "lossy":
                self._machines.lose(at, fault.seconds)
        return None


type Running = OneMachine | SeveralMachines


@contextlib.contextmanager
def started(job: JobSpec, folder: Path, *, broken: bool) -> Iterator[Running]:
    """Start the job of a run, with record and log in that folder, and end its processes at exit. Only the run with
    faults (`broken`) replaces lost ranks."""
    environment = os.environ | dict(assignment.split("=", 1) for assignment in job.environment)
    words = _words(job, folder, broken=broken)
    with (folder / "log.txt").open("ab") as log, contextlib.ExitStack() as until_the_end:
        if job.hosts == 1:
            process = subprocess.Popen([*_NTP, *words], stdout=log, stderr=subprocess.STDOUT, env=environment)
            until_the_end.callback(_end, process)
            yield OneMachine(process)
            return
        environment.setdefault("NTP_TOKEN", secrets.token_hex(16))
        hosts = job.hosts + job.spare_hosts
        machines = until_the_end.enter_context(Machines(hosts + 1))
        address = machines.address(hosts + 1)

        def start(at: int, *words: str) -> "subprocess.Popen[bytes]":
            command = [*machines.prefix(at), *_NTP, *words]
            own = environment | {"GLOO_SOCKET_IFNAME": DEVICE}
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=own)
            until_the_end.callback(_end, process)
            return process

        store = start(hosts + 1, "store", "--host", address, "--port", str(_PORT))
        flags = [f"--nnodes={job.hosts}", "--rdzv-backend=c10d", "--rdzv-id=job", "--rdzv-conf=is_host=0"]
        flags.append(f"--rdzv-endpoint={address}:{_PORT}")
        processes = {
            at: start(at, words[0], *flags, f"--local-addr={machines.address(at)}", *words[1:])
            for at in range(1, hosts + 1)
        }
        yield SeveralMachines(machines, processes, store)


def _words(job: JobSpec, folder: Path, *, broken: bool) -> list[str]:
    ours = [f"--ntp-run-dir={folder}", "--ntp-chaos"]  # the reference run records digests of its final weights, too
    ours.append("--ntp-on-error=evict")  # an injected exception is a fault; later flags of the recipe win
    if job.fork:
        ours.append("--ntp-fork")
    if broken and (job.spares or job.respawns):
        ours += [f"--ntp-spares={job.spares}", f"--ntp-respawn={job.respawns}"]
    if job.thresholds:
        ours.append(f"--ntp-thresholds={job.thresholds}")
    return ["run", *ours, *(word.replace(RUN, str(folder)) for word in job.run)]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End `ntp run`: on SIGTERM it ends its workers, on SIGKILL only itself."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
