"""Machines for tests of several hosts: network namespaces around a router, whose links can be cut and healed.

Each machine has a subnet of its own, so that the router can cut any two of them apart while both still reach the rest.
Where namespaces cannot be made, machines are addresses of the loopback device: these can be lost, but not cut off.
"""

import contextlib
import functools
import itertools
import os
import shutil
import signal
import subprocess
from pathlib import Path

from tests.ranks.command import NTP, Command

_NUMBERS = itertools.count()
_NAMES = Path("/etc/netns")
"""What is here under a namespace's name is in /etc for whoever runs in it."""


@functools.cache
def can_make_namespaces():
    """Whether this user may, and this system can."""
    name = f"ntp{os.getpid()}probe"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
    if made:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made and "NTP_TEST_LOOPBACK" not in os.environ


def machines(count, folder):
    return (Namespaces if can_make_namespaces() else Addresses)(count, folder)


class Machines:
    """So many machines, numbered from 1; a context manager that ends all that runs on them."""

    device = "lo"

    def __init__(self, count, folder):
        self.count, self.folder = count, folder
        self._commands = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for at in range(1, self.count + 1):
            self.kill(at)
        for _, command in self._commands:
            command.process.wait()

    def run(self, at, *words, name="ntp", **environment):
        """Start `ntp ...` on a machine."""
        environment["GLOO_SOCKET_IFNAME"] = self.device
        command = Command([*self.prefix(at), *NTP, *words], self.folder / f"{name}{at}", **environment)
        self._commands.append((at, command))
        return command

    def kill(self, at):
        """SIGKILL for all that runs on a machine, as when its power goes."""
        for pid in self.pids(at):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Addresses(Machines):
    """Each machine is an address of the loopback device."""

    def address(self, at):
        return f"127.0.77.{at}"

    def prefix(self, _at):
        return []

    def pids(self, at):
        parents = {int(path.name): _parent(path) for path in Path("/proc").iterdir() if path.name.isdigit()}
        found = {command.process.pid for where, command in self._commands if where == at} & parents.keys()
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return found


class Namespaces(Machines):
    """Each machine is a network namespace."""

    device = "eth0"

    def __init__(self, count, folder):
        super().__init__(count, folder)
        tag = f"ntp{os.getpid()}x{next(_NUMBERS)}"
        self._router, self._names = f"{tag}r", {at: f"{tag}m{at}" for at in range(1, count + 1)}

    def __enter__(self):
        try:
            _ip("netns", "add", self._router)
            _ip("-n", self._router, "link", "set", "lo", "up")
            _ip("netns", "exec", self._router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
            for at in self._names:
                self._connect(at)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *told):
        super().__exit__(*told)
        for name in (*self._names.values(), self._router):
            subprocess.run(["ip", "netns", "del", name], check=False)
            shutil.rmtree(_NAMES / name, ignore_errors=True)

    def _connect(self, at):
        name, gateway = self._names[at], f"10.77.{at}.1"
        _ip("netns", "add", name)
        self._let_names_be_known(name)
        _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"to{at}", "netns", self._router)
        for where, device, address in ((name, "eth0", self.address(at)), (self._router, f"to{at}", gateway)):
            _ip("-n", where, "addr", "add", f"{address}/24", "dev", device)
            _ip("-n", where, "link", "set", device, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "route", "add", "default", "via", gateway)

    def _let_names_be_known(self, name):
        """As on any machine: each connection looks a name up, and waits five seconds where nobody answers."""
        known = [f"{self.address(at)} machine{at}" for at in self._names]
        (_NAMES / name).mkdir(parents=True)
        (_NAMES / name / "hosts").write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
        (_NAMES / name / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")

    def address(self, at):
        return f"10.77.{at}.2"

    def prefix(self, at):
        return ["ip", "netns", "exec", self._names[at]]

    def pids(self, at):
        listed = subprocess.run(["ip", "netns", "pids", self._names[at]], capture_output=True, text=True, check=False)
        return [int(pid) for pid in listed.stdout.split()]

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


def _parent(process):
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
