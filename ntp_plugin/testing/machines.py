"""Emulate several machines on one: network namespaces, and links between them that can be cut, slow, or lose packets.

Each machine has its own loopback, its own address and its own processes; files and memory are those of the host. All
packets go through this process, from one tun device to another, so nothing is needed of the kernel but namespaces and
tun (and of the user that he may make them). What is connected does not notice a cut: packets are dropped, as by a
broken switch.

    with Machines(2) as machines:
        subprocess.Popen([*machines.prefix(1), "ntp", "run", ...])
        machines.cut(1, 2)
"""

import contextlib
import fcntl
import functools
import heapq
import itertools
import os
import random
import selectors
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ntp_plugin.errors import Refused

DEVICE = "eth0"
"""Of each machine: what gloo and NCCL are to be told to use."""
_TUN, _MAKE, _NO_HEADER = Path("/dev/net/tun"), 0x400454CA, 0x0001 | 0x1000
_PACKET = 32_768
_NAMES = Path("/etc/netns")
"""What is here under a namespace's name is in /etc for whoever runs in it."""
_NUMBERS = itertools.count()


@functools.cache
def why_not() -> str:
    """Why there can be no machines here; empty where there can."""
    if not os.access(_TUN, os.W_OK):
        return f"{_TUN} cannot be opened"
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    name = f"ntp{os.getpid()}probe"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "this user may not make network namespaces"
    _ip("netns", "del", name)
    return ""


class Machines:
    """So many machines, numbered from 1; a context manager that ends all that runs on them."""

    def __init__(self, count: int, *, seed: int = 1) -> None:
        if reason := why_not():
            raise Refused(f"several machines cannot be had: {reason}", fix="as root on Linux, or one machine")
        tag = f"ntp{os.getpid()}x{next(_NUMBERS)}"
        self.numbers = tuple(range(1, count + 1))
        self._names = {at: f"{tag}m{at}" for at in self.numbers}
        self._taps: dict[int, int] = {}
        self._wires = _Wires(self._taps, seed)

    def __enter__(self) -> "Machines":
        try:
            for at, name in self._names.items():
                self._connect(at, name)
        except BaseException:
            self.__exit__()
            raise
        self._wires.start()
        return self

    def __exit__(self, *_: object) -> None:
        for at in self.numbers:
            self.kill(at)
        self._wires.stop()
        for tap in self._taps.values():
            os.close(tap)
        for name in self._names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            shutil.rmtree(_NAMES / name, ignore_errors=True)

    def _connect(self, at: int, name: str) -> None:
        _ip("netns", "add", name)
        self._let_names_be_known(name)
        tap = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
        self._taps[at] = tap
        given = fcntl.ioctl(tap, _MAKE, struct.pack("16sH22x", b"ntp%d", _NO_HEADER))
        device = given[:16].rstrip(b"\0").decode()
        _ip("link", "set", device, "netns", name, "name", DEVICE)
        _ip("-n", name, "addr", "add", f"{self.address(at)}/24", "dev", DEVICE)
        _ip("-n", name, "link", "set", DEVICE, "up", "mtu", str(_PACKET))
        _ip("-n", name, "link", "set", "lo", "up")

    def _let_names_be_known(self, name: str) -> None:
        """As on any machine: each connection looks a name up, and waits five seconds where nobody answers."""
        known = [f"{self.address(at)} machine{at}" for at in self.numbers]
        (_NAMES / name).mkdir(parents=True)
        (_NAMES / name / "hosts").write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
        (_NAMES / name / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")

    # ------------------------------------------------ what runs there

    def address(self, at: int) -> str:
        """Return a machine's IP address."""
        return f"10.77.0.{at}"

    def prefix(self, at: int) -> list[str]:
        """The words before a command that is to run there."""
        return ["ip", "netns", "exec", self._names[at]]

    def pids(self, at: int) -> list[int]:
        """All that runs there."""
        listed = subprocess.run(["ip", "netns", "pids", self._names[at]], capture_output=True, text=True, check=False)
        return [int(pid) for pid in listed.stdout.split()]

    def kill(self, at: int) -> None:
        """SIGKILL for all that runs there, as when its power goes."""
        while pids := self.pids(at):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    # ------------------------------------------------ wires

    def cut(self, one: int, other: int) -> None:
        """Let no packet through between two machines."""
        self._wires.cuts |= {(one, other), (other, one)}

    def heal(self, one: int, other: int) -> None:
        """Undo a cut."""
        self._wires.cuts -= {(one, other), (other, one)}

    def cut_off(self, at: int) -> None:
        """From all others."""
        for other in set(self.numbers) - {at}:
            self.cut(at, other)

    def bring_back(self, at: int) -> None:
        """Undo that."""
        for other in set(self.numbers) - {at}:
            self.heal(at, other)

    def delay(self, at: int, seconds: float) -> None:
        """Have each packet that comes from a machine take so long; 0 undoes it."""
        self._wires.delays[at] = seconds

    def lose(self, at: int, part: float) -> None:
        """Drop so many of the packets that come from a machine: 0.01 is one in a hundred; 0 undoes it."""
        self._wires.losses[at] = part


class _Wires:
    """Takes packets from one machine to another, in a thread of its own."""

    def __init__(self, taps: dict[int, int], seed: int) -> None:
        self.cuts: set[tuple[int, int]] = set()
        self.delays: dict[int, float] = {}
        self.losses: dict[int, float] = {}
        self._taps, self._dice = taps, random.Random(seed)
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._order = itertools.count()
        self._thread = threading.Thread(target=self._carry, name="ntp-wires", daemon=True)
        self._stopping = os.eventfd(0, os.EFD_NONBLOCK)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            os.eventfd_write(self._stopping, 1)
            self._thread.join()
        os.close(self._stopping)

    def _carry(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._stopping, selectors.EVENT_READ)
            for at, tap in self._taps.items():
                selector.register(tap, selectors.EVENT_READ, at)
            while True:
                for ready, _ in selector.select(self._until_the_next()):
                    if ready.fd == self._stopping:
                        return
                    for packet in _packets(ready.fd):
                        self._send_on(ready.data, packet)
                self._deliver()

    def _until_the_next(self) -> float | None:
        return max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None

    def _send_on(self, source: int, packet: bytes) -> None:
        target = packet[19]  # the last byte of the address that an IPv4 packet goes to
        if packet[0] >> 4 != 4 or target not in self._taps or (source, target) in self.cuts:
            return
        if self._dice.random() < self.losses.get(source, 0.0):
            return
        delay = self.delays.get(source, 0.0)
        if delay:
            heapq.heappush(self._under_way, (time.monotonic() + delay, next(self._order), target, packet))
        else:
            self._put(target, packet)

    def _deliver(self) -> None:
        while self._under_way and self._under_way[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(self._under_way)
            self._put(target, packet)

    def _put(self, target: int, packet: bytes) -> None:
        with contextlib.suppress(OSError):  # a full queue drops, and so does a machine that is gone
            os.write(self._taps[target], packet)


def _packets(tap: int) -> Iterator[bytes]:
    """Yield waiting packets, a limited number at a time, so that no machine starves another."""
    for _ in range(64):
        try:
            yield os.read(tap, _PACKET + 64)
        except OSError:
            return


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
