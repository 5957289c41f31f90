"""Malformed requests to the server of copies, with and without the secret: it continues to serve peers.

A client without the secret writes nothing; half of the random bytes come from one that has it. Such a client may put a
copy where far ones are, and nowhere else.
"""

import contextlib
import hashlib
import json
import logging
import os
import random
import resource
import socket
import threading
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from ntp_plugin.copies.handshake import Credentials, authenticate
from ntp_plugin.copies.runs import Runs
from ntp_plugin.copies.store import FAR, NEAR, PARITY, REBUILT, CopyKey
from ntp_plugin.copies.wire import PeerTrouble
from tests.patience import PATIENCE_S, until
from tests.unit.copies_bytes import wrong_in
from tests.unit.test_chaos_faults import malformed
from tests.unit.test_copies_store import put, some_values, written
from tests.unit.test_copies_wire import CREDENTIALS, FAR_PLACE, SECRET, There, all_of, no_pace

MESSAGES = 1500
"""Of each of four kinds."""
ELSEWHERE = replace(FAR_PLACE, slot=5)
MEMORY, MANIFEST = written(some_values(1), step=6, slot=5)
BYTES = MEMORY.numpy().tobytes()
TEXT = MANIFEST.encode()


def line(request):
    """A request as it is sent: the length, then so many bytes."""
    text = request if isinstance(request, bytes) else json.dumps(request).encode()
    return len(text).to_bytes(8) + text


def putting(place, text=TEXT):
    return {"do": "put", "place": asdict(place), "manifest": len(text), "members": [5, 6]}


def getting():
    digests = [entry.digest for entry in MANIFEST.held[0].entries]
    return {"do": "get", "place": asdict(FAR_PLACE), "piece": 0, "runs": 2, "written": digests}


def random_bytes(dice):
    noise = dice.randbytes(dice.randrange(200))
    return dice.choice([noise, line(noise), dice.randrange(1 << 28).to_bytes(8) + noise, line(b"[" * 10_000)])


def malformed_openings(dice):
    """An answer to the challenge without the secret, or a part of one, and real requests behind it."""
    of = dice.choice([Credentials(run="run", secret="guessed"), Credentials(run="another", secret=SECRET)])
    proof = of.proof(dice.choice([b"client", b"server"]), dice.randbytes(32), dice.randbytes(32))
    answer = (dice.randbytes(32) + proof)[: dice.choice([64, 64, 64, dice.randrange(64)])]
    return answer + line(dice.choice([putting(ELSEWHERE), getting()])) + TEXT + BYTES


def malformed_requests(dice):
    """Requests of a client with the secret: any field, any byte of the line or of the manifest, or the end is wrong."""
    request = dice.choice([putting(ELSEWHERE), putting(replace(ELSEWHERE, kind=PARITY)), getting()])
    follows = (TEXT if request["do"] == "put" else b"") + BYTES
    kind = dice.randrange(5)
    if kind == 0:
        within = dice.choice([request, request["place"]])
        within[dice.choice(list(within))] = dice.choice(
            [[], {}, None, -1, 1e400, "../../x", "near", "9" * 5000, 10**30, [[1]]]
        )
        return line(request) + follows[:-8]
    if kind == 1:
        return line(malformed(json.dumps(request | {"token": 0}).encode(), dice)) + follows[:-8]
    if kind == 2:
        wrong = bytearray(TEXT)
        wrong[dice.randrange(len(wrong))] ^= 1 << dice.randrange(8)
        return line(putting(ELSEWHERE)) + wrong + BYTES
    if kind == 3:
        whole = line(request) + follows
        return whole[: dice.randrange(len(whole))]
    return line(getting()) + dice.choice([dice.randbytes(32), torch.tensor([0, 0, 1 << 33, 1]).numpy().tobytes()])


def malformed_manifests(dice):
    """Manifests of a client with the secret and a right checksum, so that they are read to the end."""
    layout, header = map(json.loads, TEXT.split(b"\n")[:2])
    tensor_slice, kinds = dice.choice(layout)
    of_slice = [(tensor_slice, at) for at in range(1, 6)] + [
        (tensor_slice[1], 0),
        (tensor_slice[3], 0),
        (tensor_slice[3][0], 1),
    ]
    of_kinds = [(kinds, 0), *((kinds[0], at) for at in range(3))]
    of_all = [(header, 4), (header[1], 0), (header, 5), (header[5], 0), (header, 6)]
    holder, at = dice.choice([*of_slice, *of_kinds, *of_all])
    holder[at] = dice.choice([-1, 1 << 40, 10**30, "x", None, [], 2.5, {}, "int64"])
    text = json.dumps(layout).encode() + b"\n" + json.dumps(header).encode()
    text += b"\n" + hashlib.blake2b(text, digest_size=16).hexdigest().encode()
    return line(putting(replace(ELSEWHERE, kind=dice.choice([ELSEWHERE.kind, PARITY])), text)) + text + BYTES


def send(there, message, *, proved):
    """Send a message and hang up; with `proved` the sender has the secret."""
    with (
        socket.create_connection(there.server.address, timeout=PATIENCE_S) as sender,
        contextlib.suppress(ConnectionError),
    ):
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if proved:
            authenticate(sender, CREDENTIALS)
        sender.sendall(message)
        with contextlib.suppress(OSError):  # it may have hung up
            sender.shutdown(socket.SHUT_WR)
        while sender.recv(1 << 16):
            pass


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def died(monkeypatch):
    """Threads that ended with an unexpected error."""
    found = []
    monkeypatch.setattr(threading, "excepthook", found.append)
    return found


@pytest.mark.parametrize("garbage", [random_bytes, malformed_openings, malformed_requests, malformed_manifests])
def test_malformed_requests_change_nothing_and_hold_nothing(tmp_path, died, garbage):
    dice = random.Random(1)
    with closing(There(tmp_path / "host" / "copies", at_most=10_000_000)) as there:
        put(there.store, FAR_PLACE, some_values(1), step=6, slot=5)
        before = contents(tmp_path)
        threads, open_ones = threading.active_count(), descriptors()
        knows_the_secret = garbage in (malformed_requests, malformed_manifests)
        for number in range(MESSAGES):
            proved = knows_the_secret or (garbage is random_bytes and number % 2 == 0)
            send(there, garbage(dice), proved=proved)
        until(lambda: threading.active_count() == threads)
        assert descriptors() <= open_ones + len(there.store._maps), "what is mapped has one"
        assert [str(one.exc_value) for one in died] == []
        after = contents(tmp_path)
        assert before.items() <= after.items()
        more = [CopyKey.read(path.name.removesuffix(".json")) for path in after.keys() - before.keys()]
        assert all(knows_the_secret and place.kind in (FAR, PARITY) for place in more)
        assert all(wrong_in(there.store, place) == [] for place, _ in there.store.found())
        assert knows_the_secret or len(there.reported) <= 1, "strangers fill no record"
        assert there.peer().put(ELSEWHERE, MANIFEST, MEMORY, pace=no_pace) == []
        held = MANIFEST.held[1]
        assert torch.equal(there.peer().get(FAR_PLACE, 1, held, all_of(held))["weight"], some_values(1)["b"])


@pytest.mark.parametrize("kind", [NEAR, REBUILT, "../far", "far/../far"])
def test_a_copy_is_only_put_where_far_ones_are(tmp_path, kind):
    with closing(There(tmp_path / "host" / "copies")) as there:
        put(there.store, replace(ELSEWHERE, kind=NEAR))
        before = contents(tmp_path)
        with pytest.raises(PeerTrouble):
            there.peer().put(replace(ELSEWHERE, kind=kind), MANIFEST, MEMORY, pace=no_pace)
        assert contents(tmp_path) == before


@pytest.mark.parametrize("runs", [[(0, 1 << 33)], [(-3, 2)], [(2999, 2)], [(0, 3000), (5, 1)], [(0, 2), (7, -1)]])
def test_invalid_elements_are_not_sent(tmp_path, runs):
    with closing(There(tmp_path)) as there:
        _, manifest = put(there.store, FAR_PLACE)
        held, (starts, lengths) = manifest.held[0], torch.tensor(runs).T
        message = getting() | {"runs": len(runs), "written": [entry.digest for entry in held.entries]}
        with socket.create_connection(there.server.address, timeout=PATIENCE_S) as sender:
            authenticate(sender, CREDENTIALS)
            sender.sendall(line(message) + torch.stack([starts, lengths]).numpy().tobytes())
            assert sender.recv(1) == b""
        assert there.peer().get(FAR_PLACE, 0, held, Runs(starts=torch.tensor([2999]), lengths=torch.tensor([1])))


def test_a_server_without_a_descriptor_takes_connections_again_when_there_is_one(tmp_path, caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with closing(There(tmp_path)) as there, caplog.at_level(logging.WARNING):
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
        try:
            with socket.create_connection(there.server.address, timeout=PATIENCE_S):
                until(lambda: "was not taken" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert there.peer().put(ELSEWHERE, MANIFEST, MEMORY, pace=no_pace) == []
