"""Forks workers from one process of the host that has done the imports (`ntp run --ntp-fork`).

Importing torch and a framework costs a process seconds of a core and hundreds of MB of memory. With a fork server a
host pays this once, and the replacement of a lost worker starts at once.

`ForkServer` is the agent's side. The other side is this file as a script: it imports, and then answers requests from
its socket one after the other. On a request for a worker it forks, and the child continues as that worker. It refuses
if an import has opened a GPU, which forks could not use. On a request for an exit code it waits for the child, as its
parent. The agent sees by itself that a child has ended, so the loss of the fork server ends no worker.
"""

import atexit
import contextlib
import dataclasses
import gc
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ntp_plugin.errors import Refused, in_one_line
from ntp_plugin.launch import quick_exit
from ntp_plugin.launch.bound import bound
from ntp_plugin.launch.process_end import end
from ntp_plugin.launch.script import run
from ntp_plugin.launch.spares import be_worker, import_ahead

HOW_IS_NOT_KNOWN = 255
"""Stands for the exit code of a child whose fork server was lost before it had reported the code."""
_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


class Forked:
    """A forked worker, with the methods of `subprocess.Popen` that torch's agent and ours use."""

    def __init__(self, pid: int, fork_server: "ForkServer") -> None:
        self.pid, self._fork_server = pid, fork_server
        self._pidfd = os.pidfd_open(pid)
        self._lock = threading.Lock()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while the worker runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the worker's end and return its exit code; raise `subprocess.TimeoutExpired` after the timeout."""
        if not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
        with self._lock:
            if self.returncode is None:
                self.returncode = self._fork_server.code_of(self.pid)
            return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the worker, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        os.close(self._pidfd)


@dataclasses.dataclass(frozen=True)
class Handler:
    """Takes the place of torch's handler of a worker."""

    proc: Forked

    def close(self, death_sig: int | None = None) -> None:
        """End the worker and the processes that it has started, as torch does."""
        end(self.proc, death_sig or signal.SIGTERM)


class ForkServer:
    """The agent's side: starts the process that forks, and asks it for workers."""

    def __init__(self, entrypoint: str, words: Sequence[str] = ()) -> None:
        """`words`: the command line of the workers' script, by which is decided what is imported."""
        if entrypoint != sys.executable:
            raise Refused(f"--ntp-fork needs a Python script, and the job runs {entrypoint}", fix="leave it out")
        self._lock, self._words = threading.Lock(), tuple(words)
        self._start()

    def _start(self) -> None:
        mine, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                bound([sys.executable, "-m", __name__, str(theirs.fileno()), *self._words]),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # an import that looks for a GPU must not open it, so that the children can
                env={_NVML: "1"} | os.environ,
                start_new_session=True,
            )
        self._socket, self._lines, self._imports = mine, mine.makefile("rb"), True

    def worker(
        self,
        *,
        entrypoint: str,
        args: Sequence[str],
        env: Mapping[str, str],
        stdout: str | None,
        stderr: str | None,
        local_rank_id: int,
        numa_options: Any = None,
    ) -> Handler:
        """Start a worker, with the arguments by which torch's agent starts a process."""
        assert entrypoint == sys.executable, "checked in __init__"
        if numa_options is not None:
            raise Refused(
                f"--ntp-fork: worker {local_rank_id} cannot be bound to a NUMA node, because it has done its imports",
                fix="leave out --numa-binding, or --ntp-fork",
            )
        words = [word for word in args if word != "-u"]
        with self._lock:
            if self._process.poll() is not None:
                self._start()
            answer = self._asked({"worker": [words, dict(os.environ | env), stdout, stderr]})
            if answer is None:
                code = self._process.wait()
                raise Refused(
                    f"--ntp-fork: the process that does the imports exited with {code} before it forked this worker",
                    fix="see its output above, or leave out --ntp-fork",
                )
            self._imports = False
            return Handler(Forked(answer, self))

    def code_of(self, child: int) -> int:
        """Return the exit code of a child that has ended, and reap it. Call it once for each child."""
        with self._lock:
            code = self._asked({"ended": child})
        return HOW_IS_NOT_KNOWN if code is None else code

    def _asked(self, what: Mapping[str, Any]) -> int | None:
        """Send a request and return the answer; None if the process is lost."""
        try:
            self._socket.sendall(json.dumps(what).encode() + b"\n")
            line = self._lines.readline()
        except OSError:
            return None
        return int(line) if line else None

    def close(self) -> None:
        """End the process. It ends when its socket closes; while it still imports it has to be killed."""
        if self._imports:
            self._process.kill()
        self._lines.close()
        self._socket.close()
        self._process.wait()


# ---------------------------------------------------------------- the process that forks


def main(arguments: Sequence[str]) -> None:
    """Import, and fork until the agent is lost. In a child it returns when the worker's script has ended."""
    quick_exit.arm()  # before the imports: the children inherit the order of the handlers
    import_ahead(arguments[1:])
    _refuse_a_gpu()
    gc.collect()
    gc.freeze()  # a collection would write into every page that the children share
    atexit.register(gc.unfreeze)  # libraries look for leftover objects when Python ends, here and in the children
    words = None
    with contextlib.suppress(ConnectionError):  # the agent is lost
        words = _forks(socket.socket(fileno=int(arguments[0])))
    if words is not None:
        run(words)
    else:
        quick_exit.set_exit_code(0)  # the agent waits for this process


def _refuse_a_gpu() -> None:
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        raise Refused(
            "--ntp-fork: a module in NTP_PRELOAD has opened the GPU at its import, and a fork cannot use a GPU that its"
            " parent has opened",
            fix="take the module out of NTP_PRELOAD, or leave out --ntp-fork",
        )


def _forks(agent: socket.socket) -> list[str] | None:
    """Answer requests until the agent closes the socket, then return None; in a child return its command line."""
    with agent, agent.makefile("rwb", buffering=0) as wire:
        for line in wire:
            asked = json.loads(line)
            if "ended" in asked:
                answer = _end_of(asked["ended"])
            elif (answer := os.fork()) == 0:
                break
            wire.write(b"%d\n" % answer)
        else:
            return None
    return _born(*asked["worker"])


def _end_of(child: int) -> int:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except ChildProcessError:  # an earlier fork server, now lost, had forked it
        return HOW_IS_NOT_KNOWN


def _born(words: list[str], environment: Mapping[str, str], stdout: str | None, stderr: str | None) -> list[str]:
    """Give a forked child what a started process has: a session, an environment (which keeps what imports have set),
    an output, and its own random numbers."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent of `ntp run` may have had it ignored
    be_worker(environment, stdout, stderr)
    sys.stdout, sys.stderr = (  # as `python -u` has them
        io.TextIOWrapper(io.FileIO(descriptor, "wb", closefd=False), write_through=True) for descriptor in (1, 2)
    )
    sys.path[0] = str(Path.cwd())
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    return words


if __name__ == "__main__":
    sys.excepthook = in_one_line(sys.excepthook)
    main(sys.argv[1:])
