"""Runs a job as torchrun's agent does, but does not stop the other workers when one dies (`ntp run`).

Rendezvous, environment, logs and signals are torchrun's own. The difference is what happens when a worker ends.
torchrun stops all workers of all hosts and restarts them. This agent keeps the others running, informs them through the
next view, and starts a new process or a warm spare in the lost slot, at most `respawn` times. The job is done when its
members have agreed that it is. Workers without heartbeats, whose script does not use the plugin, must all exit with 0.

All hosts share the store of the rendezvous. A host that cannot reach it ends its workers, so that never two parts of a
job continue separately.
"""

import argparse
import contextlib
import dataclasses
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed.launcher.api as launcher
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as elastic_processes
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record
from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler
from torch.distributed.run import run as torchrun

from ntp_plugin.errors import Excluded, NotStarted, NtpError, ScriptError, StoreLost
from ntp_plugin.launch import host_membership, job_store, signed_rendezvous
from ntp_plugin.launch.bound import bound
from ntp_plugin.launch.fork_server import HOW_IS_NOT_KNOWN, ForkServer
from ntp_plugin.launch.host_membership import Arrival, HostMembership, JobIsDone
from ntp_plugin.launch.hosts import Hosts
from ntp_plugin.launch.kept_copies import DAY_S, in_words, new_folder
from ntp_plugin.launch.process_end import end
from ntp_plugin.launch.reachability import RefusingEndpoint
from ntp_plugin.launch.reaper import Reaper
from ntp_plugin.launch.recording import RecordingOptions
from ntp_plugin.launch.run_folder import RunFolder
from ntp_plugin.launch.script import with_hooks
from ntp_plugin.launch.script_errors import ScriptErrors
from ntp_plugin.launch.spares import Spares
from ntp_plugin.launch.started_by import StartedBy
from ntp_plugin.launch.supervisor import ASK_S_PER_HOST, Supervisor
from ntp_plugin.launch.torchrun_flags import store_in_rank_0
from ntp_plugin.membership.failure_detector import NOT_NEEDED, RankFailure, Thresholds
from ntp_plugin.membership.heartbeat import HeartbeatFile
from ntp_plugin.membership.protocol import MemberId
from ntp_plugin.membership.restored_keys import RestoredKeys
from ntp_plugin.membership.running_time import MOST_S, RunningTime
from ntp_plugin.membership.store import TorchStore, own_address
from ntp_plugin.recovery.rank_context import corner, first_view, founding_incarnation
from ntp_plugin.recovery.script_failure import FOLDER, OnError
from ntp_plugin.telemetry import Hung, KeyRestored, RankLost

_PUBLISH_S = 2.0
"""Seconds from a failure that a supervisor knows to the view that all ranks read."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunPolicy:
    """The settings of `ntp run` beyond torchrun's flags."""

    respawn: int = 0
    """How many lost workers to replace, in all."""
    spares: int = 0
    """How many warm spare processes to keep."""
    fork: bool = False
    """Whether to fork workers from one process that has done the imports."""
    resume: Path | None = None
    """A folder of copies that the job resumes from."""
    copies_keep_s: float = DAY_S
    """How long the copies of this run stay if it dies."""
    export: Path | None = None
    """A folder for a checkpoint: the job only writes the copies of `resume` there, and ends."""
    deepspeed: str | None = None
    """The `ntp` block of a DeepSpeed job whose script builds its configuration itself, as JSON."""
    through: tuple[str, ...] = ()
    """Arguments of Python before the script, for a module that runs it: `-m MODULE ARGUMENT`."""
    on_error: OnError = "stop"
    """What to do when a rank fails by an error of its own script."""
    recording: RecordingOptions = dataclasses.field(default_factory=RecordingOptions)
    thresholds: Thresholds = dataclasses.field(default_factory=Thresholds)


class TolerantAgent(LocalElasticAgent):
    """torchrun's agent, which survives failed workers. torch makes the instance, so the policy is a class variable."""

    policy: ClassVar[RunPolicy] = RunPolicy()
    worst_code: ClassVar[int] = 0
    """The highest exit code of ours among all workers that failed, else 1."""

    _host_membership: HostMembership
    _job: TorchStore
    _supervisor: Supervisor | None = None
    _spares: Spares | None = None
    _fork_server: ForkServer | None = None
    _reaper: Reaper | None = None
    _is_ended = False
    """Whether the supervisors have ended the job because of one rank."""

    # ------------------------------------------------ joining the job

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        handler: Any = worker_group.spec.rdzv_handler
        signed_rendezvous.sign(handler, secret=os.environ[job_store.TOKEN])
        self._refuse(worker_group)
        # torch asks whether machines wait to join, and would then restart all workers; ours join through
        # `host_membership`.
        handler.num_nodes_waiting = lambda: 0
        shared = getattr(handler, "_store", None)
        if isinstance(shared, TCPStore):
            # torch would start a second store, which our workers never use and which any process could reach.
            handler._create_tcp_store_server = lambda *_: shared
            self._open(shared.host, shared.port, handler.get_run_id())
            joined = self._arrival(worker_group).join(handler.settings.max_nodes)
            if joined is not None:
                self._take_place(worker_group, joined)
                return
        super()._rendezvous(worker_group)
        if isinstance(shared, TCPStore):
            self._send_workers_to_the_store(worker_group)
        else:
            self._open(str(worker_group.master_addr), int(worker_group.master_port or 0), handler.get_run_id())
        self._host_membership = self._found(worker_group)

    def _arrival(self, worker_group: WorkerGroup) -> Arrival:
        return Arrival(
            self._job,
            name=f"{socket.gethostname()}/{uuid.uuid4()}",
            workers=worker_group.spec.local_world_size,
            thresholds=self.policy.thresholds,
            log=_say,
        )

    def _found(self, worker_group: WorkerGroup) -> HostMembership:
        first = worker_group.workers[0]
        return host_membership.found(
            self._job,
            host=int(worker_group.group_rank or 0),
            hosts=int(worker_group.group_world_size or 1),
            workers=worker_group.spec.local_world_size,
            slots=first.world_size,
            first_slot=first.global_rank,
        )

    def _refuse(self, worker_group: WorkerGroup) -> None:
        if not worker_group.spec.rdzv_handler.use_agent_store:
            raise store_in_rank_0()

    def _open(self, host: str, port: int, run_id: str) -> None:
        """Connect to the store, on a connection of its own, limited to the keys of this job."""
        self._store_address = host, port
        connection, mine = TCPStore(host, port, None, False), corner(run_id)
        self._corner = PrefixStore(mine, connection)
        self._job = TorchStore(connection, corner=mine, token=os.environ[job_store.TOKEN])
        self._job.refuse_strangers()

    def _send_workers_to_the_store(self, worker_group: Any) -> None:
        """Point workers at the job's store: torch would start another one on the first host, and lose it with it."""
        worker_group.master_addr, worker_group.master_port = self._store_address

    def _take_place(self, worker_group: Any, joined: HostMembership) -> None:
        """Fill in what torch's rendezvous would have returned, as a host of a job that runs already."""
        self._host_membership, slots = joined, joined.slots
        worker_group.store = self._corner
        worker_group.group_rank, worker_group.group_world_size = joined.host, joined.hosts
        self._send_workers_to_the_store(worker_group)
        worker_group.workers = [
            Worker(
                local_rank=local,
                global_rank=joined.first_slot + local,
                role_rank=joined.first_slot + local,
                world_size=slots,
                role_world_size=slots,
            )
            for local in range(joined.workers)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        place = self._host_membership
        self._recording = self.policy.recording.begin(
            os.environ,
            host=place.host,
            founds=not place.incarnation,
            agreed=lambda own: self._job.create("run of wandb", own),
            log=_say,
        )
        os.environ.update(self._recording.passed_to_workers)
        self._folder = RunFolder("ntp-run-")
        self._copies = new_folder(
            keep_s=self.policy.copies_keep_s,
            spares=lambda left: self.policy.export is not None or left == self.policy.resume,
            log=_say,
        )
        self._recorded(worker_group.spec).write(self._copies.path)
        for name, value in (
            ("NTP_RESUME", self.policy.resume),
            ("NTP_EXPORT", self.policy.export),
            ("NTP_DEEPSPEED", self.policy.deepspeed),
        ):
            if value is not None:
                os.environ[name] = str(value)
        os.environ["NTP_COPIES"] = str(self._copies.path)
        self._heartbeats = HeartbeatFile(self._folder.path / "heartbeats", place.slots)
        os.environ["NTP_HEARTBEATS"] = str(self._heartbeats.path)
        self._reaper = Reaper("NTP_HEARTBEATS")
        os.environ["NTP_HEARTBEAT_S"] = str(self.policy.thresholds.heartbeat_interval_s)
        os.environ["NTP_HUNG_S"] = str(self.policy.thresholds.hung_s)
        if place.hosts > 1:  # the loss of a host takes longer to detect than the end of a process
            os.environ["NTP_PUBLISH_S"] = str(self.policy.thresholds.host_s + _PUBLISH_S)
        if place.incarnation:
            os.environ["NTP_HOST_INCARNATION"] = str(place.incarnation)
        self._supervisor = Supervisor(
            RestoredKeys(self._job, report=self._report_restored),
            first_view(place.slots),
            self._heartbeats,
            thresholds=self.policy.thresholds,
            report=self._report_lost,
            reported_hung=self._reported_hung,
            hosts=self._hosts() if place.hosts > 1 else None,
            script_errors=self._script_errors(),
            ask_s=place.hosts * ASK_S_PER_HOST,
        )
        self._answered_at = self._supervisor.answered_at
        self._unanswered = RunningTime(most_s=max(MOST_S, 2 * worker_group.spec.monitor_interval))
        self._births = 0
        self._lost: set[int] = set()
        self._lock = threading.Lock()
        self._finished = False
        if worker_group.spec.entrypoint == sys.executable:  # another Python may not have this package
            worker_group.spec.args = with_hooks(worker_group.spec.args, through=self.policy.through)
        self._fork_server = (
            ForkServer(str(worker_group.spec.entrypoint), worker_group.spec.args) if self.policy.fork else None
        )
        self._new_worker: Any = _bound_worker if self._fork_server is None else self._fork_server.worker
        elastic_processes.get_subprocess_handler = self._new_worker  # type: ignore[attr-defined,assignment]
        pids: dict[int, Any] = super()._start_workers(worker_group)
        for worker in worker_group.workers:
            self._watch(
                worker.global_rank, worker.local_rank, founding_incarnation(worker.global_rank, place.incarnation)
            )
        context: Any = self._pcontext
        self._spares = (
            Spares(context.entrypoint, context.args[0], most=self.policy.spares)
            if self.policy.spares and self._fork_server is None  # a fork server makes spares superfluous
            else None
        )
        if self._spares is not None:
            self._spares.fill(self.policy.respawn)
        self._supervisor.start()
        return pids

    def _recorded(self, spec: Any) -> StartedBy:
        return StartedBy(
            words=(str(spec.entrypoint), *map(str, spec.args)),
            folder=Path.cwd(),
            workers=self._host_membership.workers,
            hosts=self._host_membership.hosts,
        )

    def _script_errors(self) -> ScriptErrors:
        folder = self._folder.path / "failures"
        folder.mkdir()
        os.environ[FOLDER] = str(folder)
        self._errors = ScriptErrors(
            self._job,
            folder,
            on_error=self.policy.on_error
            if self.policy.export is None
            else "evict",  # an export has its own exit codes
            host=self._host_membership.host,
            hosts=self._host_membership.hosts,
            log=_say,
        )
        return self._errors

    def _hosts(self) -> Hosts:
        place = self._host_membership
        return Hosts(
            self._job,
            host=place.host,
            host_incarnation=place.incarnation,
            hosts=place.hosts,
            slots=place.slots,
            endpoint=RefusingEndpoint(own_address(self._store_address)),
            thresholds=self.policy.thresholds,
        )

    # ------------------------------------------------ while it runs

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Check the job once; never calls `self._pcontext.wait()`, which closes all workers once one has failed."""
        assert self._supervisor is not None, "there are workers"
        trouble = self._trouble()
        all_reported = trouble is not None or self._supervisor.has_reported_all()
        # When the job is over its store may end first: the workers here need it no more, and end by themselves.
        over = self._finished or self._supervisor.view.over
        if trouble is not None and (not over or isinstance(trouble, ScriptError | NotStarted)):
            self._is_ended = isinstance(trouble, ScriptError | NotStarted)
            TolerantAgent.worst_code = self._worst_code()
            if not self._is_ended:  # every further request of torch would wait for the lost store
                worker_group.spec.rdzv_handler.shutdown = lambda: True  # type: ignore[method-assign]
            raise trouble
        self._respawn(worker_group)
        codes = [handler.proc.poll() for handler in self._handlers().values()]
        if any(code is None for code in codes) or not all_reported:
            return RunResult(state=WorkerState.HEALTHY)
        if not self._finished:
            self._finished = True
            self._supervisor.finish()
            if self._host_membership.hosts > 1 and trouble is None and not self._supervisor.view.over:
                _say("all workers of this host have ended; it waits for the end of the job on the other hosts")
        # A store that is lost by now has ended with its host, because the job was over.
        if trouble is None and not self._supervisor.over:
            return RunResult(state=WorkerState.HEALTHY)
        done = self._is_done(codes, store_left=trouble is not None)
        if done:
            self._copies.empty()
        self._end_supervision()
        if done:
            return RunResult(
                state=WorkerState.SUCCEEDED, return_values={worker.global_rank: None for worker in worker_group.workers}
            )
        return self._failure(worker_group)

    def _is_done(self, codes: Sequence[int], *, store_left: bool) -> bool:
        """Whether the job succeeded: by the agreement of workers with heartbeats, else by all exit codes."""
        assert self._supervisor is not None, "there are workers"
        if not self._supervisor.has_heard_heartbeats:
            return not any(codes)
        mine = range(self._host_membership.first_slot, self._host_membership.first_slot + self._host_membership.workers)
        were_in = set(self._supervisor.last.slots) & set(mine)
        well = {0} if self._fork_server is None else {0, HOW_IS_NOT_KNOWN}
        ended_well = bool(well & set(codes))
        return (self._supervisor.view.over or store_left) and (ended_well or not were_in)

    def _failure(self, worker_group: WorkerGroup) -> RunResult:
        TolerantAgent.worst_code = self._worst_code()
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

    def _worst_code(self) -> int:
        """Return the highest exit code of ours among the workers, also of one that was killed as it ended; else 1."""
        ours = NtpError.codes() - {Excluded.exit_code}  # an excluded worker is not the reason why the job failed
        ended = [handler.proc for handler in self._handlers().values() if handler.proc.poll() is not None]
        codes = {code for process in ended for code in (process.returncode, self._errors.code_of(process.pid))}
        return max((code for code in codes if code in ours), default=1)

    def _trouble(self) -> NtpError | None:
        """Return why this host has to leave the job, or None."""
        assert self._supervisor is not None, "there are workers"
        if self._answered_at != self._supervisor.answered_at:
            self._answered_at = self._supervisor.answered_at
            self._unanswered.begin_again()
        silence = self._unanswered.seconds()
        if self._supervisor.trouble is not None or silence <= self.policy.thresholds.store_s:
            return self._supervisor.trouble
        host, port = self._store_address
        return StoreLost(
            f"the job's store at {host}:{port} has not answered for {silence:.1f} s: this host is cut off, or the"
            " store's host is lost",
            fix="if other hosts go on, start the same command here again; else restart from the last checkpoint",
        )

    def _exit_barrier(self) -> None:
        """Do nothing: the workers of all hosts have ended already."""

    def _shutdown(self, *args: Any, **options: Any) -> None:
        self._end_supervision()
        super()._shutdown(*args, **options)
        if self._is_ended:
            self._errors.wait_for_other_hosts(self.policy.thresholds.host_s)
        if self._fork_server is not None:  # needed until here, for the exit codes of workers
            self._fork_server.close()
            self._fork_server = None
        if self._reaper is not None:
            self._reaper.close()
            self._reaper = None

    def _end_supervision(self) -> None:
        if self._supervisor is None:
            return
        hung = time.monotonic() - self._supervisor.answered_at > self.policy.thresholds.host_s
        self._supervisor.stop(wait=not hung)
        self._supervisor = None
        if self._spares is not None:
            self._spares.close()
        if not hung:
            self._heartbeats.close()
        self._folder.remove()
        self._end_copies()
        self._recording.end()

    def _end_copies(self) -> None:
        """Remove the copies, unless there are some of a failed job: they may be all that remains of its last steps."""
        if any(self._copies.path.glob("*/*.json")):
            self._copies.leave()
            _say(
                f"copies of the last steps stay in {self._copies.path} for {in_words(self.policy.copies_keep_s)}, or"
                " until a run needs the memory: see ntp copies --help"
            )
        else:
            self._copies.remove()

    # ------------------------------------------------ one worker

    def _handlers(self) -> dict[int, Any]:
        handlers: dict[int, Any] = self._pcontext.subprocess_handlers  # type: ignore[union-attr]
        return handlers

    def _watch(self, slot: int, local_rank: int, incarnation: str) -> None:
        assert self._supervisor is not None, "there are workers"
        process = self._handlers()[local_rank].proc
        self._supervisor.watch(MemberId(slot=slot, incarnation=incarnation), process.pid, process.wait)

    def _report_lost(self, member_id: MemberId, verdict: RankFailure) -> None:
        """Log a lost rank, and mark its process to be ended. Called on the supervisor's thread."""
        here = self._handlers().get(member_id.slot - self._host_membership.first_slot)
        pid = here.proc.pid if here is not None else 0
        if verdict.kind == NOT_NEEDED:
            _say(f"slot {member_id.slot} (pid {pid}) is ended: {verdict.reason}")
        else:
            _say(f"slot {member_id.slot} is lost: {verdict.reason}")
            self._recording.write(RankLost(number=member_id.slot, pid=pid, kind=verdict.kind, reason=verdict.reason))
        with self._lock:
            self._lost.add(member_id.slot)

    def _reported_hung(self, waiting: int) -> None:
        seconds = self.policy.thresholds.hung_s
        _say(
            f"all {waiting} ranks have waited for each other for {seconds:g} s, so none counts as lost: they are in"
            " collectives that do not match, which end by torch's timeout (py-spy dump --pid PID shows where)"
        )
        self._recording.write(Hung(waiting=waiting, seconds=seconds))

    def _report_restored(self, key: str, what: str) -> None:
        _say(what)
        self._recording.write(KeyRestored(key=key, what=what))

    def _respawn(self, worker_group: WorkerGroup) -> None:
        with self._lock:
            lost, self._lost = self._lost, set()
        for worker in worker_group.workers:
            if worker.global_rank not in lost:
                continue
            old = self._handlers()[worker.local_rank].proc
            if old.poll() is None:  # frozen, silent, hung or cut off: it is evicted, and must not come back
                end(old, signal.SIGKILL)
                old.wait()
            if self._births < self.policy.respawn and self._job_goes_on() and self._reaches_all():
                self._births += 1
                self._start_anew(worker.global_rank, worker.local_rank)

    def _job_goes_on(self) -> bool:
        """Whether the job still runs, so that a new worker could join it."""
        assert self._supervisor is not None, "there are workers"
        return not self._finished and bool(self._supervisor.view.member_ids)

    def _reaches_all(self) -> bool:
        """Whether a new worker here could connect to the other hosts; otherwise it would only delay them."""
        assert self._supervisor is not None, "there are workers"
        if missed := self._supervisor.unreachable():
            _say(f"no new worker is started here: this host cannot connect to hosts {', '.join(map(str, missed))}")
        return not missed

    def _start_anew(self, slot: int, local_rank: int) -> None:
        context: Any = self._pcontext
        incarnation = f"{slot}/{self._births}@{self._host_membership.host}.{self._host_membership.incarnation}"
        environment = context.envs[local_rank] | {"NTP_INCARNATION": incarnation}
        stdout, stderr = context.stdouts[local_rank], context.stderrs[local_rank]
        handler: Any = self._spares.take() if self._spares is not None else None
        how = "comes back in a warm spare" if handler is not None else "starts anew"
        if handler is not None:
            handler.become(context.args[local_rank], environment, stdout, stderr)
        else:
            handler = self._new_worker(
                entrypoint=context.entrypoint,
                args=context.args[local_rank],
                env=environment,
                stdout=stdout,
                stderr=stderr,
                local_rank_id=local_rank,
            )
        context.subprocess_handlers[local_rank] = handler
        self._watch(slot, local_rank, incarnation)
        _say(f"slot {slot} {how} (pid {handler.proc.pid})")
        if self._spares is not None:
            self._spares.fill(self.policy.respawn - self._births)


def _bound_worker(*, entrypoint: str, args: Sequence[object], **options: Any) -> Any:
    """Start a worker as torch's agent does, but one that does not outlive this process."""
    program, *words = bound([entrypoint, *map(str, args)])
    return get_subprocess_handler(entrypoint=program, args=tuple(words), **options)


def run(arguments: argparse.Namespace, policy: RunPolicy) -> int:
    """Run a job as `torchrun` does with these arguments, but keep it running after a loss.

    Args:
        arguments: torchrun's, from `torchrun_flags.parse`.
        policy: The settings of `ntp run` beyond them.

    Returns:
        The exit code of the job.
    """
    TolerantAgent.policy = policy
    launcher.LocalElasticAgent = TolerantAgent  # type: ignore[attr-defined]
    os.environ[job_store.TOKEN] = job_store.token_of(arguments, os.environ)  # the workers inherit it
    store = job_store.start_store(arguments, say=_say)
    try:
        record(torchrun)(arguments)
    except ChildFailedError:
        _say("no worker ended well")
        return TolerantAgent.worst_code
    except elastic_processes.SignalException as error:
        _say(f"ended by {error.sigval.name}")
        return 128 + error.sigval
    except JobIsDone:
        _say("the job is done, and did not need this machine")
        return 0
    except NotStarted as error:
        _say(str(error))
        return TolerantAgent.worst_code
    except (StoreLost, Excluded, ScriptError) as error:
        _say(str(error))
        return error.exit_code
    finally:
        del store  # the job needs it until here
    _say("done")
    return 0


def _say(what: str) -> None:
    """Print a log line; a closed output, as of `ntp run | head`, does not disturb the job."""
    with contextlib.suppress(OSError):
        print(f"ntp run: {what}".encode(errors="backslashreplace").decode(), flush=True)
