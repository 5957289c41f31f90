"""Machines for tests of several hosts: network namespaces around a router, whose links can be cut and healed.

Each machine has a subnet of its own, so that the router can cut any two of them apart while both still reach the rest.
"""

import contextlib
import itertools
import os
import signal
import subprocess

from tests.ranks.command import NTP, Command

_NUMBERS = itertools.count()


def can_make_namespaces():
    """Whether this user may, and this system can."""
    name = f"ntp{os.getpid()}probe"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
    if made:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made


class Machines:
    """So many machines, numbered from 1; a context manager that ends all that runs on them."""

    def __init__(self, count, folder):
        self.folder, self._tag = folder, f"ntp{os.getpid()}x{next(_NUMBERS)}"
        self._commands = []
        self._router, self._names = f"{self._tag}r", {at: f"{self._tag}m{at}" for at in range(1, count + 1)}

    def __enter__(self):
        _ip("netns", "add", self._router)
        _ip("-n", self._router, "link", "set", "lo", "up")
        _inside(self._router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for at, name in self._names.items():
            _ip("netns", "add", name)
            _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"to{at}", "netns", self._router)
            for where, device, address in (
                (name, "eth0", self.address(at)),
                (self._router, f"to{at}", f"10.77.{at}.1"),
            ):
                _ip("-n", where, "addr", "add", f"{address}/24", "dev", device)
                _ip("-n", where, "link", "set", device, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "route", "add", "default", "via", f"10.77.{at}.1")
        return self

    def __exit__(self, *_):
        for at in self._names:
            self.kill(at)
        for command in self._commands:
            command.process.wait()
        for name in (*self._names.values(), self._router):
            _ip("netns", "del", name)

    def address(self, at):
        return f"10.77.{at}.2"

    def run(self, at, *words, name="ntp", **environment):
        """Start `ntp ...` on a machine."""
        command = ["ip", "netns", "exec", self._names[at], *NTP, *words]
        self._commands.append(Command(command, self.folder / f"{name}{at}", GLOO_SOCKET_IFNAME="eth0", **environment))
        return self._commands[-1]

    def kill(self, at):
        """SIGKILL for all that runs on a machine, as when its power goes."""
        listed = subprocess.run(["ip", "netns", "pids", self._names[at]], capture_output=True, text=True, check=True)
        for pid in listed.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def running(self, at):
        """How many processes run on a machine."""
        listed = subprocess.run(["ip", "netns", "pids", self._names[at]], capture_output=True, text=True, check=True)
        return len(listed.stdout.split())

    def cut(self, one, other):
        """Let no packet through between two machines; whatever is connected does not notice."""
        self._rules("add", one, other)

    def heal(self, one, other):
        """Undo a cut."""
        self._rules("del", one, other)

    def _rules(self, verb, one, other):
        for source, target in ((one, other), (other, one)):
            subnets = "from", f"10.77.{source}.0/24", "to", f"10.77.{target}.0/24"
            _ip("-n", self._router, "rule", verb, "blackhole", *subnets)


def _ip(*words):
    subprocess.run(["ip", *words], check=True)


def _inside(name, *words):
    subprocess.run(["ip", "netns", "exec", name, *words], check=True)
