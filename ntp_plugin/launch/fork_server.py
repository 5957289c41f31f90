"""Workers that are forked from one process of their host, which has done the imports: `ntp run --ntp-fork`.

To import torch and a framework takes a process seconds of a core, and hundreds of MB of memory. Where every worker is
a fork of one that has done it, a host does it once, and a worker that takes a lost one's place is there at once.

`ForkServer` is the agent's side. The other side is this file as a script: it imports, and then answers one question
after the other that comes through its socket. Asked for a worker it forks, and the child goes on as that worker; where
what was imported has opened a GPU, which forks could not use, it refuses. Asked how a child has ended it looks: it is
the parent. That a child has ended, the agent sees by itself, so a fork server that is lost takes nobody with it.
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
"""The exit code of a child whose fork server was lost before it had told."""
_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


class Forked:
    """A child, as much of it as torch's agent and ours ask of a `subprocess.Popen`."""

    def __init__(self, pid: int, fork_server: "ForkServer") -> None:
        self.pid, self._fork_server = pid, fork_server
        self._pidfd = os.pidfd_open(pid)
        self._lock = threading.Lock()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """How it has ended, or None."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended; how it did."""
        if not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
        with self._lock:
            if self.returncode is None:
                self.returncode = self._fork_server.code_of(self.pid)
            return self.returncode

    def send_signal(self, number: int) -> None:
        """To the child, if it is there."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        os.close(self._pidfd)


@dataclasses.dataclass(frozen=True)
class Handler:
    """Stands where torch's agent keeps its handler of a worker."""

    proc: Forked

    def close(self, death_sig: int | None = None) -> None:
        """End it, with what it has started, as torch ends a worker."""
        end(self.proc, death_sig or signal.SIGTERM)


class ForkServer:
    """The agent's side."""

    def __init__(self, entrypoint: str) -> None:
        if entrypoint != sys.executable:
            raise Refused(f"--ntp-fork needs a Python script, and the job runs {entrypoint}", way_out="leave it out")
        self._lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        mine, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                bound([sys.executable, "-m", __name__, str(theirs.fileno())]),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # what asks while it is imported whether there is a GPU is not to open it, so that children can
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
        """A new one, asked for as torch's agent asks for a process."""
        assert entrypoint == sys.executable, "it was looked at"
        if numa_options is not None:
            raise Refused(
                f"--ntp-fork: worker {local_rank_id} is to be bound to a NUMA node, which is done before it imports",
                way_out="leave out --numa-binding, or --ntp-fork",
            )
        words = [word for word in args if word != "-u"]
        with self._lock:
            if self._process.poll() is not None:
                self._start()
            answer = self._asked({"worker": [words, dict(os.environ | env), stdout, stderr]})
            if answer is None:
                code = self._process.wait()
                raise Refused(
                    f"--ntp-fork: the process that does the imports ended with code {code}, and had forked no worker",
                    way_out="what it said stands above; or leave out --ntp-fork",
                )
            self._imports = False
            return Handler(Forked(answer, self))

    def code_of(self, child: int) -> int:
        """How one ended that has; it is gone then."""
        with self._lock:
            code = self._asked({"ended": child})
        return HOW_IS_NOT_KNOWN if code is None else code

    def _asked(self, what: Mapping[str, Any]) -> int | None:
        """Its answer; None when it is gone."""
        try:
            self._socket.sendall(json.dumps(what).encode() + b"\n")
            line = self._lines.readline()
        except OSError:
            return None
        return int(line) if line else None

    def close(self) -> None:
        """It ends when its socket does; who still imports would look only then, and fork who was asked for."""
        if self._imports:
            self._process.kill()
        self._lines.close()
        self._socket.close()
        self._process.wait()


# ---------------------------------------------------------------- the process that forks


def main(arguments: Sequence[str]) -> None:
    """Imports, and forks until the agent is gone. In a child it returns when the worker's script has ended."""
    quick_exit.arm()  # for the children, before what they get imported
    import_ahead()
    _refuse_a_gpu()
    gc.collect()
    gc.freeze()  # a collection would write into every page that the children share
    atexit.register(gc.unfreeze)  # libraries look for what is left over when Python ends, here and in the children
    words = None
    with contextlib.suppress(ConnectionError):  # the agent is gone
        words = _forks(socket.socket(fileno=int(arguments[0])))
    if words is not None:
        run(words)
    else:
        quick_exit.set_exit_code(0)  # the agent waits for this process


def _refuse_a_gpu() -> None:
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        raise Refused(
            "--ntp-fork: something that NTP_PRELOAD names has opened the GPU while it was imported, and a fork cannot"
            " use one that its parent has opened",
            way_out="leave it out of NTP_PRELOAD, or leave out --ntp-fork",
        )


def _forks(agent: socket.socket) -> list[str] | None:
    """None when the agent is gone; in a child its words."""
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
    except ChildProcessError:  # it was forked by one before this one, that was lost
        return HOW_IS_NOT_KNOWN


def _born(words: list[str], environment: Mapping[str, str], stdout: str | None, stderr: str | None) -> list[str]:
    """Be a process as if it had been started: its session, its environment (and what imports have set in it), its
    output, its own randomness."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which whoever started `ntp run` may have had ignored
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
