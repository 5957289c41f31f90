"""Whoever sends garbage to what a job listens at changes nothing; on one host it listens on loopback alone."""

import os
import random
import socket
from pathlib import Path

from ntp_plugin.comm.store import TorchStore, serve
from tests.ranks.command import NTP, RECIPES, Command

MESSAGES = 10_000


def garbage(dice):
    """Bytes at random, or as a client of the store might begin, with numbers that make no sense."""
    noise = bytes(dice.randrange(256) for _ in range(dice.randrange(200)))
    return dice.choice(
        [noise, bytes([dice.randrange(20)]) + noise, b"\x01" + b"\xff" * 8 + noise, b"\x3c\x85\xf7\xa5" + noise]
    )


def test_ten_thousand_malformed_messages_leave_the_store_as_it_was():
    from torch._C._distributed_c10d import TCPStore  # noqa: PLC0415

    server = serve("127.0.0.1", 0)
    store = TorchStore(TCPStore("127.0.0.1", server.port, None, False), corner="a job", token="its token")
    store.create("a key", "its value")
    dice = random.Random(1)
    for number in range(MESSAGES):
        with socket.create_connection(("127.0.0.1", server.port)) as sender:
            try:
                sender.sendall(garbage(dice))
            except OSError:  # it has hung up, which is its right
                continue
        if number % 1000 == 0:
            assert store.read("a key") == "its value"
    assert store.read("a key") == "its value"
    assert store.create("another", "value") == "value"


def test_a_job_of_one_host_listens_on_loopback_alone(tmp_path):
    words = [*NTP, "run", "--standalone", "--nproc-per-node=2", str(RECIPES / "train.py")]
    job = Command(words, tmp_path / "log", STEPS="10", PAUSE_S="0.1")
    job.wait_for(r"slot 0 is pid \d+")
    pids = [job.process.pid, *children(job.process.pid)]
    assert len(pids) == 3
    addresses = {address for pid in pids for address in listened_at(pid)}
    code, said = job.end()
    assert code == 0, said
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
    return address in ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
