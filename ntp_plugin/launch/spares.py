"""Keeps warm spares: processes that have done their imports, and become workers on demand.

A spare runs this file as its script, with the command line of a worker behind it. It does the slow imports and waits
for one line: the command line and the environment of the worker whose place it takes. Then it runs the worker's script
as if it had been started with these. Command lines differ between workers where one has torch's `${local_rank}`.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ntp_plugin.errors import Refused
from ntp_plugin.launch import quick_exit
from ntp_plugin.launch.bound import bound
from ntp_plugin.launch.process_end import end
from ntp_plugin.launch.script import install_cpu_emulation, run

PRELOADED = ("torch", "torch.distributed", "torch._dynamo", "ntp_plugin.plain.job")
"""The modules that a spare imports; NTP_PRELOAD names more, separated by commas."""


class Spare:
    """A waiting process. Once it is a worker, it takes the place of torch's handler of that worker."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.proc = subprocess.Popen(
            bound([sys.executable, "-u", "-m", __name__, *arguments]), stdin=subprocess.PIPE, start_new_session=True
        )

    def become(
        self, arguments: Sequence[str], environment: Mapping[str, str], stdout: str | None, stderr: str | None
    ) -> None:
        """Turn the process into a worker with this command line and environment, and its output in these files."""
        assert self.proc.stdin is not None
        line = json.dumps([_without_u(arguments), dict(environment), stdout, stderr])
        self.proc.stdin.write(line.encode() + b"\n")
        self.proc.stdin.close()

    def close(self, death_sig: Any = None) -> None:
        """End the process and those that it has started, as torch does."""
        end(self.proc, death_sig or signal.SIGTERM)


class Spares:
    """The waiting spares of a host: at most `most`, and no more than workers may still be replaced."""

    def __init__(self, entrypoint: str, arguments: Sequence[str], *, most: int) -> None:
        if entrypoint != sys.executable:
            raise Refused(
                f"--ntp-spares needs a Python script, and the job runs {entrypoint}", fix="leave out --no-python"
            )
        self._arguments = _without_u(arguments)
        self._most = most
        self._waiting: list[Spare] = []

    def fill(self, budget: int) -> None:
        """Start the missing spares, but no more than `budget`."""
        self._waiting = [spare for spare in self._waiting if spare.proc.poll() is None]
        while len(self._waiting) < min(self._most, budget):
            self._waiting.append(Spare(self._arguments))

    def take(self) -> Spare | None:
        """Return a live spare, if there is one."""
        while self._waiting:
            spare = self._waiting.pop(0)
            if spare.proc.poll() is None:
                return spare
        return None

    def close(self) -> None:
        """Kill the spares that were not used."""
        for spare in self._waiting:
            spare.proc.kill()
            spare.proc.wait()
        self._waiting.clear()


def _without_u(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without Python's flag: a spare's own output is unbuffered already."""
    return [argument for argument in arguments if argument != "-u"]


def import_ahead(words: Sequence[str]) -> None:
    """Import the modules that every worker of the job will import.

    Args:
        words: The command line of the workers' script.
    """
    install_cpu_emulation(words)
    for name in (*PRELOADED, *filter(None, os.environ.get("NTP_PRELOAD", "").split(","))):
        importlib.import_module(name)


def be_worker(environment: Mapping[str, str], stdout: str | None, stderr: str | None) -> None:
    """Take over a worker's environment, and redirect the output to its files; None keeps the stream."""
    os.environ.update(environment)
    for path, descriptor in ((stdout, 1), (stderr, 2)):
        if path:
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), descriptor)


def main(arguments: Sequence[str]) -> None:
    """Run in the spare: import, wait, then run the worker's script."""
    quick_exit.arm()
    import_ahead(arguments)
    line = sys.stdin.buffer.readline()
    if not line:  # the job is over, and this spare was not needed
        return
    words, environment, stdout, stderr = json.loads(line)
    be_worker(environment, stdout, stderr)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    run(words)


if __name__ == "__main__":
    main(sys.argv[1:])
