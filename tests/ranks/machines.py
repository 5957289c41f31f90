"""Machines for tests of several hosts, and the commands that run on them.

Without namespaces a machine is an address of the loopback device: it can be lost, but not disconnected.
"""

import contextlib
import os
import signal
from pathlib import Path

from ntp_plugin.testing.machines import DEVICE, Machines, why_not
from tests.ranks.command import NTP, Command

TOKEN = "the token of all machines of a test"


def can_make_namespaces():
    """Whether there are machines whose wires can be cut."""
    return not why_not() and "NTP_TEST_LOOPBACK" not in os.environ


def machines(count, folder):
    return Hosts(Machines(count) if can_make_namespaces() else Addresses(), folder)


class Hosts:
    """Runs `ntp ...` on machines; what each says goes to a file."""

    def __init__(self, machines, folder):
        self._machines, self._folder, self._commands = machines, folder, []
        self.address, self.kill, self.pids = machines.address, machines.kill, machines.pids
        if can_make_namespaces():
            self.cut, self.heal = machines.cut, machines.heal

    def __enter__(self):
        self._machines.__enter__()
        return self

    def __exit__(self, *exception):
        self._machines.__exit__(*exception)
        for command in self._commands:
            command.process.wait()

    def run(self, at, *words, name="ntp", **environment):
        """Start `ntp ...` on a machine."""
        environment = {"NTP_TOKEN": TOKEN} | environment
        environment["GLOO_SOCKET_IFNAME"] = DEVICE if can_make_namespaces() else "lo"
        command = Command([*self._machines.prefix(at), *NTP, *words], self._folder / f"{name}{at}", **environment)
        self._commands.append(command)
        return command


class Addresses:
    """Each machine is an address of the loopback device."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for at in range(1, 10):
            self.kill(at)

    def address(self, at):
        return f"127.0.77.{at}"

    def prefix(self, at):
        """The words before a command on a machine, whose processes are identified by their environment."""
        return ["env", f"NTP_TEST_MACHINE={os.getpid()}.{at}"]

    def pids(self, at):
        mark = f"NTP_TEST_MACHINE={os.getpid()}.{at}".encode()
        return [
            int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and mark in _environment(path)
        ]

    def kill(self, at):
        while pids := self.pids(at):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _environment(process):
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
