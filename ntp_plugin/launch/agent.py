"""`ntp run`: torchrun's agent, but a dead worker does not end its siblings.

Rendezvous, environment, logs and signals are torchrun's own. Different is what happens when a worker ends: torchrun
stops all workers and starts them anew; this agent lets the others go on, tells them through the next view, and starts
a new process in the dead slot as long as `respawn` allows. The job is done when the last worker has ended well; it has
failed when none did.

Not built yet: warm spares, and a store that outlives the first host.
"""

import dataclasses
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed.launcher.api as launcher
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler
from torch.distributed.run import main as torchrun

from ntp_plugin.comm.membership import Seat
from ntp_plugin.comm.store import TorchStore
from ntp_plugin.errors import ConfigError, Excluded, NtpError
from ntp_plugin.launch.supervisor import Supervisor
from ntp_plugin.recovery.detector import Thresholds, Verdict
from ntp_plugin.recovery.heartbeat import HeartbeatFile
from ntp_plugin.recovery.place import MEMBERSHIP, first_view, founding_occupant

_SHARED_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunPolicy:
    """What `ntp run` is told beyond torchrun's flags."""

    respawn: int = 0
    thresholds: Thresholds = dataclasses.field(default_factory=Thresholds)


class TolerantAgent(LocalElasticAgent):
    """torchrun's agent with another idea of a failed worker. torch makes it, so its policy waits in the class."""

    policy: ClassVar[RunPolicy] = RunPolicy()
    worst_code: ClassVar[int] = 0
    """Of all workers that ended badly: the highest exit code that is ours, else 1."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if not worker_group.spec.rdzv_handler.use_agent_store:
            raise ConfigError(
                "with this rendezvous the store lives in rank 0, and dies with it",
                way_out="use --standalone, or --rdzv-backend c10d with --rdzv-endpoint",
            )
        if worker_group.spec.max_restarts:
            raise ConfigError(
                f"--max-restarts = {worker_group.spec.max_restarts} would start all workers anew after a failure",
                way_out="leave it out; --ntp-respawn starts single workers anew",
            )
        slots = worker_group.workers[0].world_size
        self._folder = Path(tempfile.mkdtemp(prefix="ntp-run-", dir=_SHARED_MEMORY))
        self._heartbeats = HeartbeatFile(self._folder / "heartbeats", slots)
        os.environ["NTP_HEARTBEATS"] = str(self._heartbeats.path)
        os.environ["NTP_BEAT_S"] = str(self.policy.thresholds.beat_s)
        client = TCPStore(str(worker_group.master_addr), int(worker_group.master_port or 0), None, False)
        self._supervisor = Supervisor(
            TorchStore(PrefixStore(MEMBERSHIP, client)),
            first_view(slots),
            self._heartbeats,
            thresholds=self.policy.thresholds,
            told=self._told,
        )
        self._births = 0
        self._lost: set[int] = set()
        self._lock = threading.Lock()
        pids: dict[int, Any] = super()._start_workers(worker_group)
        for worker in worker_group.workers:
            self._watch(worker.global_rank, worker.local_rank, founding_occupant(worker.global_rank))
        self._supervisor.start()
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Never asks `self._pcontext.wait()`, which would close all workers as soon as one has failed."""
        self._respawn(worker_group)
        codes = [handler.proc.poll() for handler in self._handlers().values()]
        if any(code is None for code in codes):
            return RunResult(state=WorkerState.HEALTHY)
        self._end_supervision()
        if 0 in codes:
            return RunResult(
                state=WorkerState.SUCCEEDED, return_values={worker.global_rank: None for worker in worker_group.workers}
            )
        ours = NtpError.codes() - {Excluded.exit_code}  # who was left behind does not say why the job failed
        TolerantAgent.worst_code = max((code for code in codes if code in ours), default=1)
        failures = {
            worker.global_rank: ProcessFailure(
                local_rank=worker.local_rank,
                pid=self._handlers()[worker.local_rank].proc.pid,
                exitcode=self._handlers()[worker.local_rank].proc.returncode,
                error_file="<N/A>",
            )
            for worker in worker_group.workers
        }
        return RunResult(state=WorkerState.FAILED, failures=failures)

    def _shutdown(self, *args: Any, **options: Any) -> None:
        self._end_supervision()
        super()._shutdown(*args, **options)

    # ------------------------------------------------ one worker

    def _handlers(self) -> dict[int, Any]:
        handlers: dict[int, Any] = self._pcontext.subprocess_handlers  # type: ignore[union-attr]
        return handlers

    def _watch(self, slot: int, local_rank: int, occupant: str) -> None:
        process = self._handlers()[local_rank].proc
        self._supervisor.watch(Seat(slot=slot, occupant=occupant), process.pid, process.wait)

    def _told(self, seat: Seat, verdict: Verdict) -> None:
        """On the supervisor's thread: one line, and an end for a process that would not notice by itself."""
        print(f"ntp run: slot {seat.slot} is lost: {verdict.reason}", flush=True)
        with self._lock:
            self._lost.add(seat.slot)

    def _respawn(self, worker_group: WorkerGroup) -> None:
        with self._lock:
            lost, self._lost = self._lost, set()
        for worker in worker_group.workers:
            if worker.global_rank not in lost:
                continue
            old = self._handlers()[worker.local_rank].proc
            if old.poll() is None:  # frozen, silent or hung: it is out, and must not come back
                old.kill()
                old.wait()
            if self._births < self.policy.respawn and old.returncode != Excluded.exit_code:
                self._births += 1
                self._start_anew(worker.global_rank, worker.local_rank)

    def _start_anew(self, slot: int, local_rank: int) -> None:
        context: Any = self._pcontext
        occupant = f"{slot}/{self._births}@{socket.gethostname()}"
        handler = get_subprocess_handler(
            entrypoint=context.entrypoint,
            args=context.args[local_rank],
            env=context.envs[local_rank] | {"NTP_OCCUPANT": occupant},
            stdout=context.stdouts[local_rank],
            stderr=context.stderrs[local_rank],
            local_rank_id=local_rank,
        )
        context.subprocess_handlers[local_rank] = handler
        self._watch(slot, local_rank, occupant)
        print(f"ntp run: slot {slot} starts anew (pid {handler.proc.pid})", flush=True)

    def _end_supervision(self) -> None:
        if hasattr(self, "_supervisor") and self._folder.exists():
            self._supervisor.stop()
            self._heartbeats.close()
            shutil.rmtree(self._folder)


def run(torchrun_arguments: Sequence[str], policy: RunPolicy) -> int:
    """What `torchrun` does with these arguments, but tolerant; returns the exit code of the job."""
    TolerantAgent.policy = policy
    launcher.LocalElasticAgent = TolerantAgent  # type: ignore[attr-defined]
    try:
        torchrun(list(torchrun_arguments))
    except ChildFailedError:
        print("ntp run: no worker ended well", flush=True)
        return TolerantAgent.worst_code
    print("ntp run: done", flush=True)
    return 0
