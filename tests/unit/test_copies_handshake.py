"""Both ends of a connection for copies prove that they have the job's key before anything else is read or sent.

A client without the key costs a descriptor for some seconds, and no thread and no memory.
"""

import contextlib
import socket
import threading
from contextlib import closing
from pathlib import Path

import pytest

from ntp_plugin.copies.wire import Peer, PeerTrouble
from tests.patience import until
from tests.unit.test_copies_store import some_values, written
from tests.unit.test_copies_wire import CREDENTIALS, FAR_PLACE, SECRET, There, no_pace, received_until_the_end

STRANGERS, ANNOUNCING = 200, 40
LONG_LINE = (1 << 26).to_bytes(8) + b"{" + b" " * 1000
"""The first bytes of a request of 64 MB."""
MORE_MEMORY_KB = 30_000
"""Each took 64 MB before the secret was checked."""


def resident_kb():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def put_one(there):
    memory, manifest = written(some_values())
    return there.peer().put(FAR_PLACE, manifest, memory, pace=no_pace)


def test_unauthenticated_clients_with_long_lines_take_no_memory_and_block_nobody(tmp_path):
    with closing(There(tmp_path)) as there, contextlib.ExitStack() as open_ones:
        assert put_one(there) == [], "memory that it needs in any case"
        memory, threads = resident_kb(), threading.active_count()
        for _ in range(ANNOUNCING):
            stranger = open_ones.enter_context(socket.create_connection(there.server.address, timeout=20))
            with contextlib.suppress(ConnectionError):
                stranger.sendall(LONG_LINE)
        assert put_one(there) == []
        assert resident_kb() - memory < MORE_MEMORY_KB
        assert threading.active_count() <= threads + 1, "the one of the peer that was served"
        until(lambda: not there.server.pending)
        assert len(there.reported) == 1, "the record is not filled by them"


def test_silent_clients_are_limited_and_the_oldest_is_dropped_first(tmp_path):
    with closing(There(tmp_path)) as there, contextlib.ExitStack() as open_ones:
        silent = [
            open_ones.enter_context(socket.create_connection(there.server.address, timeout=20))
            for _ in range(STRANGERS)
        ]
        assert len(received_until_the_end(silent[0])) <= 40, "a challenge, and then the end"
        assert there.server.pending <= 64
        assert put_one(there) == []


@pytest.mark.parametrize("words", [[b""], [b"x"] * 63])
def test_a_slow_unauthenticated_client_is_dropped_in_time(tmp_path, words):
    with closing(There(tmp_path, handshake_s=0.3)) as there:
        with socket.create_connection(there.server.address, timeout=20) as slow:
            with contextlib.suppress(OSError):
                for word in words:
                    slow.sendall(word)
            with contextlib.suppress(ConnectionError):
                assert len(received_until_the_end(slow)) <= 40
        until(lambda: not there.server.pending)
        assert there.reported == [], "who says nothing wrong is not reported"


class Between:
    """A wire tap: it passes on what comes, both ways, and keeps it."""

    def __init__(self, towards):
        self._listener, self._towards = socket.create_server(("127.0.0.1", 0)), towards
        self.address = self._listener.getsockname()
        self.sent, self.answered = bytearray(), bytearray()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        client, _ = self._listener.accept()
        with client, socket.create_connection(self._towards) as server:
            back = threading.Thread(target=self._pass, args=(server, client, self.answered))
            back.start()
            self._pass(client, server, self.sent)
            back.join()

    @staticmethod
    def _pass(source, sink, kept):
        with contextlib.suppress(OSError):
            while more := source.recv(1 << 16):
                kept += more
                sink.sendall(more)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self):
        self._thread.join()
        self._listener.close()


def tapped(there):
    """The bytes in both directions while a copy is sent."""
    between = Between(there.server.address)
    with closing(between):
        peer = Peer(between.address, run="run", secret=SECRET, timeout_s=20.0)
        memory, manifest = written(some_values())
        assert peer.put(FAR_PLACE, manifest, memory, pace=no_pace) == []
        peer.close()
    return bytes(between.sent), bytes(between.answered)


def test_the_secret_is_not_on_the_wire(tmp_path):
    with closing(There(tmp_path)) as there:
        sent, answered = tapped(there)
        assert sent
        assert SECRET.encode() not in sent + answered


def test_a_replayed_conversation_is_rejected(tmp_path):
    with closing(There(tmp_path)) as there:
        sent, _ = tapped(there)
        there.store.forget_since(0)
        with socket.create_connection(there.server.address, timeout=20) as replayed:
            with contextlib.suppress(ConnectionError):
                replayed.sendall(sent)
            with contextlib.suppress(ConnectionError):
                assert len(received_until_the_end(replayed)) <= 40
        until(lambda: there.reported)
        assert list(there.store.found()) == []


def test_no_state_is_sent_to_an_impostor_on_the_port_of_a_dead_server():
    memory, manifest = written(some_values())
    received = bytearray()

    def impostor():
        connection, _ = listening.accept()
        with connection:
            connection.sendall(b"ntp-cop1" + b"r" * 32)
            received.extend(connection.recv(64, socket.MSG_WAITALL))
            connection.sendall(b"?" * 32)
            received.extend(received_until_the_end(connection))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=impostor)
        thread.start()
        peer = Peer(listening.getsockname(), run="run", secret=SECRET, timeout_s=20.0)
        with pytest.raises(PeerTrouble, match="another NTP_TOKEN"):
            peer.put(FAR_PLACE, manifest, memory, pace=no_pace)
        thread.join()
    assert len(received) == 64


def test_a_proof_holds_for_one_side_one_run_and_one_connection():
    proofs = {
        of.proof(side, servers, clients)
        for of in (CREDENTIALS, type(CREDENTIALS)(run="another", secret=SECRET))
        for side in (b"client", b"server")
        for servers in (b"1" * 32, b"2" * 32)
        for clients in (b"1" * 32, b"2" * 32)
    }
    assert len(proofs) == 16
    assert SECRET not in repr(CREDENTIALS)
