"""Garbage sent to the ports of a job changes nothing; on one host the job listens on loopback only.

The first bytes of a client of torch's store are no password: a second write of a connection is read as commands
whatever the first was. So most of the garbage here begins as a client does, and every command is tried with an error in
it. A well-formed command of another process is obeyed, as `docs/operations.md` says; so no command here uses a key of
the job.
"""

import os
import random
import resource
import socket
import struct
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import PrefixStore

from ntp_plugin.membership.store import TorchStore, serve
from tests.patience import PATIENCE_S, until
from tests.ranks.command import NTP, PAUSED, RECIPES, Command

MESSAGES = 10_000
OPENING = b"\0" + struct.pack("<I", 0x3C85F7CE)
"""The first bytes of a client: VALIDATE, and torch's number for it."""
MORE_MEMORY = 200_000_000
"""torch's store keeps 4 KB and more of each incomplete command. Lengths here exceed this."""


def noise(dice, size):
    return bytes(dice.randrange(256) for _ in range(dice.randrange(size)))


def random_bytes(dice):
    """Bytes at random, or as a client of the store might begin, with numbers that make no sense."""
    sent = noise(dice, 200)
    return [
        dice.choice(
            [sent, bytes([dice.randrange(20)]) + sent, b"\x01" + b"\xff" * 8 + sent, b"\x3c\x85\xf7\xa5" + sent]
        )
    ]


# ---------------------------------------------------------------- as a client begins


def sized(data):
    return struct.pack("<Q", len(data)) + data


def number(value):
    return struct.pack("<q", value)


def strange_key(dice):
    """torch puts a slash before the keys of its clients, so that no client uses this one."""
    return sized(b"strange %d " % dice.randrange(50) + noise(dice, 20))


BODIES = {
    1: lambda dice: strange_key(dice) + sized(noise(dice, 50)),
    2: lambda dice: strange_key(dice) + sized(noise(dice, 3)) + sized(noise(dice, 50)),
    3: strange_key,
    4: lambda dice: strange_key(dice) + number(dice.choice([-1, 1, 2**62])),
    5: lambda dice: number(2) + strange_key(dice) + strange_key(dice),
    6: lambda dice: number(2) + strange_key(dice) + strange_key(dice),
    8: strange_key,
    9: lambda dice: strange_key(dice) + sized(noise(dice, 50)),
    10: lambda dice: number(2) + strange_key(dice) + strange_key(dice),
    11: lambda dice: number(1) + strange_key(dice) + sized(noise(dice, 50)),
    13: lambda dice: noise(dice, 5),
    14: lambda dice: strange_key(dice) + sized(noise(dice, 50)),
    15: strange_key,
    16: strange_key,
    18: lambda dice: strange_key(dice) + number(dice.choice([-1, 0, 1, 2, 2**62])),
}
"""Opcode -> what belongs behind it; 7, 12 and 17 have nothing there, and from 19 on there are none."""


def malformed(dice, body):
    """With something wrong in it: a length, the end, any byte, or nothing."""
    kind, at = dice.randrange(6), dice.randrange(len(body) + 1)
    if kind == 0:
        return body[:at]
    if kind == 1:
        wrong = dice.choice([0, 1, 7, 8192, 8193, 1 << 17, 8 << 20, (8 << 20) + 1, 1 << 32, 1 << 62, (1 << 64) - 1])
        return struct.pack("<Q", wrong) + body[8:]
    if kind == 2:
        return body[:at] + bytes([dice.randrange(256)]) + body[at + 1 :]
    if kind == 3:
        return body[:at] + struct.pack("<Q", dice.randrange(1 << 64)) + body[at + 8 :]
    return body + (noise(dice, 40) if kind == 4 else b"")


def malformed_commands(dice):
    """One or more, behind the opening, or with a write before them that is none."""
    sent = [OPENING] if dice.randrange(10) else [noise(dice, 10) or b"?"]
    for _ in range(dice.randrange(1, 4)):
        opcode = dice.choice([*range(20), dice.randrange(256)])
        sent.append(bytes([opcode]) + malformed(dice, BODIES[opcode](dice) if opcode in BODIES else b""))
    return sent if dice.randrange(2) else [b"".join(sent)]


# ---------------------------------------------------------------- and what it comes to


class Served:
    """A store in this process, and a client of it that waits for seconds and not for minutes."""

    def __init__(self):
        from torch._C._distributed_c10d import TCPStore  # noqa: PLC0415

        self.server = serve("127.0.0.1", 0)
        self.torchs = TCPStore("127.0.0.1", self.server.port, None, False, timedelta(seconds=20))
        self.store = TorchStore(self.torchs, corner="a job", token="its token")
        self.store.create("a key", "its value")

    def hear(self, writes):
        """Discard the answer."""
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=PATIENCE_S) as sender:
            sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                for write in writes:
                    sender.sendall(write)
            except OSError:  # it has hung up, which is its right
                return

    def is_as_ever(self, name):
        assert self.store.read("a key") == "its value"
        assert self.store.create(name, "value") == "value"
        assert self.store.read(name) == "value"
        assert self.store.read("nobody's") is None
        assert self.store.present(["a key", name])
        assert not self.store.present(["a key", "nobody's"])


@pytest.mark.parametrize("garbage", [random_bytes, malformed_commands])
def test_ten_thousand_malformed_messages_leave_the_store_unchanged(garbage):
    served, dice = Served(), random.Random(1)
    memory, open_ones = resident(), descriptors()
    for message in range(MESSAGES):
        served.hear(garbage(dice))
        if message % 500 == 0:
            served.is_as_ever(f"after {message}")
            assert served.store.count("a counter", 1) == message // 500 + 1
    served.is_as_ever("at last")
    assert resident() - memory < MORE_MEMORY, "it takes as much as it is sent, whatever lengths say"
    until(lambda: descriptors() <= open_ones)
    obeyed = served.torchs.num_keys()
    assert (obeyed > 1000) == (garbage is malformed_commands), f"{obeyed} keys: well-formed commands come that far"


@pytest.mark.parametrize("opening", [OPENING, b""])
def test_an_outsiders_well_formed_command_is_executed_and_its_value_ignored(opening):
    """This shows that the malformed part above is the only error; and that any process that reaches the store can
    change it."""
    served = Served()
    theirs = PrefixStore("a job", served.torchs)
    command = b"\x01" + sized(b"/a job/a key") + sized(b"another value")
    with socket.create_connection(("127.0.0.1", served.server.port), timeout=PATIENCE_S) as sender:
        sender.sendall(opening)

        def is_obeyed():
            sender.sendall(command)
            return theirs.get("a key") == b"another value"

        until(is_obeyed)
    assert served.store.read("a key") is None
    assert served.store.create("a key", "its value") == "its value"


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


# ---------------------------------------------------------------- what listens


def test_a_job_of_one_host_listens_on_loopback_alone(tmp_path):
    words = [*NTP, "run", "--standalone", "--nproc-per-node=2", str(RECIPES / "train.py")]
    job = Command(words, tmp_path / "log", STEPS="10", PAUSE_S="0.1")
    job.wait_for(r"slot 0 is pid \d+")
    pids = [job.process.pid, *children(job.process.pid)]
    assert len(pids) == 4, "ntp run, two workers, and the process that ends what a killed ntp run leaves"
    addresses = {address for pid in pids for address in listened_at(pid)}
    code, output = job.end()
    assert code == 0, output
    assert addresses
    assert all(is_loopback(address) for address in addresses), addresses


def test_a_job_of_several_hosts_listens_on_the_addresses_of_these_alone(tmp_path):
    """Two machines that are two addresses of the loopback device; torch's own store would listen on all of them."""
    with socket.create_server(("127.0.79.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=job"]
    flags.append(f"--rdzv-endpoint=127.0.79.1:{port}")
    jobs = [
        Command(
            [*NTP, "run", *flags, f"--rdzv-conf=is_host={2 - at}", f"--local-addr=127.0.79.{at}", str(PAUSED)],
            tmp_path / f"log{at}",
            **{"STEPS": "400", "PAUSE_S": "0.1", "RECIPE": str(RECIPES / "train.py"), "GLOO_SOCKET_IFNAME": "lo"},
            NTP_TOKEN="a token of 25 characters.",
        )
        for at in (1, 2)
    ]
    pids = [job.process.pid for job in jobs]
    pids += [int(job.wait_for(r"slot \d+ is pid (\d+)")[1]) for job in jobs]
    addresses = {address for pid in pids for address in listened_at(pid)}
    for job in jobs:
        job.go_on()
    for job in jobs:
        code, output = job.end()
        assert code == 0, output
    assert addresses
    assert all(is_loopback(address) for address in addresses), addresses


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def listened_at(pid):
    """Addresses of the sockets of a process that listen, as the system writes them."""
    sockets = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(path))  # noqa: PTH115  (a descriptor may be gone)
        except OSError:
            continue
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                yield fields[1].split(":")[0]


def is_loopback(address):
    """All of 127.0.0.0/8, which the system writes backwards; of IPv6 ::1, and that network mapped into it."""
    return address == "00000000000000000000000001000000" or (
        address.endswith("7F") and address[:-8] in ("", "0000000000000000FFFF0000")
    )
