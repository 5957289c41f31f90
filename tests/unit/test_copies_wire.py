"""Copies from host to host arrive as they were sent; no one waits for ever, and no outsider gets state."""

import contextlib
import dataclasses
import socket
import threading
import time
from contextlib import closing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ntp_plugin.copies.handshake import Credentials, authenticate
from ntp_plugin.copies.manifest import view
from ntp_plugin.copies.runs import Runs
from ntp_plugin.copies.slices import indices
from ntp_plugin.copies.store import FAR, CopyKey, Store
from ntp_plugin.copies.wire import Peer, PeerTrouble, Server, WrongCopy
from tests.patience import PATIENCE_S, until
from tests.unit.copies_bytes import bytes_of, mapped
from tests.unit.test_copies_store import put, some_values, written

FAR_PLACE = CopyKey(kind=FAR, slot=3, epoch=2, number=0)
SECRET = "only members know"
CREDENTIALS = Credentials(run="run", secret=SECRET)


class There:
    """Another host: its store, its server, and the reports of the server."""

    def __init__(self, folder, *, at_most=None, **options):
        self.store, self.reported, self.peers = Store(folder, at_most=at_most), [], []
        self.server = Server(
            self.store, run="run", secret=SECRET, host="127.0.0.1", report=self.reported.append, **options
        )

    def peer(self, *, run="run", secret=SECRET, timeout_s=PATIENCE_S):
        self.peers.append(Peer(self.server.address, run=run, secret=secret, timeout_s=timeout_s))
        return self.peers[-1]

    def close(self):
        for peer in self.peers:
            peer.close()
        self.server.close()
        self.store.close()


@pytest.fixture
def there(tmp_path):
    there = There(tmp_path / "there")
    yield there
    there.close()


@contextlib.contextmanager
def deaf_server():
    """A server that accepts connections, if the test does, and never reads."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening, listening.getsockname()


def as_server(connection, credentials):
    """The server's half of a handshake; what the client has sent in it."""
    challenge = b"c" * 32
    connection.sendall(b"ntp-cop1" + challenge)
    answer = connection.recv(64, socket.MSG_WAITALL)
    connection.sendall(credentials.proof(b"server", challenge, answer[:32]))
    return answer


def received_until_the_end(connection):
    found = b""
    while more := connection.recv(1 << 16):
        found += more
    return found


def no_pace(_):
    """Send as fast as possible."""


def test_a_copy_that_is_put_is_found_on_the_other_side(there):
    memory, manifest = written(some_values())
    paces = []
    assert there.peer().put(FAR_PLACE, manifest, memory, pace=paces.append) == []
    assert list(there.store.found()) == [(FAR_PLACE, manifest)]
    assert torch.equal(bytes_of(there.store, FAR_PLACE)[: manifest.size], memory)
    assert sum(paces) == manifest.size
    assert there.reported == []


def test_another_copy_goes_over_the_same_connection(there):
    peer = there.peer()
    for step in (5, 6, 7):
        memory, manifest = written(some_values(step), step=step)
        assert peer.put(FAR_PLACE, manifest, memory, pace=no_pace) == []
        assert list(there.store.found()) == [(FAR_PLACE, manifest)]
        assert torch.equal(bytes_of(there.store, FAR_PLACE)[: manifest.size], memory)


def test_a_copy_without_bytes_is_sent(there):
    memory, manifest = written({})
    assert there.peer().put(FAR_PLACE, manifest, memory, pace=no_pace) == []
    assert list(there.store.found()) == [(FAR_PLACE, manifest)]


def test_bytes_that_differ_from_the_manifest_are_no_copy(there):
    peer = there.peer()
    memory, manifest = written(some_values())
    for number in (0, 2):
        held = manifest.held[number]
        view(memory, held, held.entries[0]).view(torch.uint8)[5] ^= 64
    assert peer.put(FAR_PLACE, manifest, memory, pace=no_pace) == ["a (weight)", "c (weight)"]
    assert list(there.store.found()) == []
    (message,) = there.reported
    assert message.startswith("slot 3 sent a (weight) of step 5 as laid out in epoch 2")
    memory, manifest = written(some_values())
    assert peer.put(FAR_PLACE, manifest, memory, pace=no_pace) == [], "and the next one is welcome"
    assert list(there.store.found()) == [(FAR_PLACE, manifest)]


def test_a_put_that_breaks_off_leaves_no_copy_and_not_the_old_one_either(there):
    put(there.store, FAR_PLACE)
    memory, manifest = written(some_values(1), step=6)
    announced_longer = dataclasses.replace(manifest, size=manifest.size + 64)

    def broken_off(_):
        raise ConnectionResetError("as if the host had died")

    with pytest.raises(PeerTrouble, match="as if the host had died"):
        there.peer().put(FAR_PLACE, announced_longer, memory, pace=broken_off)
    until(lambda: not list(there.store.found()))
    until(lambda: not there.server._open)
    assert list(there.store.found()) == []
    assert (there.store.folder / str(FAR_PLACE)).exists(), "it had begun"


def test_a_full_host_reports_it_and_can_be_asked_again(tmp_path):
    with closing(There(tmp_path, at_most=20_000)) as there:
        peer = there.peer()
        memory, manifest = written(some_values(size=10_000))
        with pytest.raises(PeerTrouble, match=r"the process at 127\.0\.0\.1:\d+ has no room: .*would take 0\.1 MB"):
            peer.put(FAR_PLACE, manifest, memory, pace=no_pace)
        (message,) = there.reported
        assert "would take 0.1 MB" in message
        connection = peer._connection
        memory, manifest = written(some_values())
        assert peer.put(FAR_PLACE, manifest, memory, pace=no_pace) == []
        assert peer._connection is connection is not None
        assert list(there.store.found()) == [(FAR_PLACE, manifest)]


def test_any_elements_can_be_requested(there):
    values, peer = some_values(), there.peer()
    _, manifest = put(there.store, FAR_PLACE, values)

    @settings(max_examples=25)
    @given(st.data())
    def elements_come_as_they_are(data):
        number = data.draw(st.integers(0, 2))
        held = manifest.held[number]
        bounds = sorted(data.draw(st.sets(st.integers(0, held.tensor_slice.size), min_size=2, max_size=12)))
        chosen = data.draw(st.permutations(list(zip(bounds[:-1:2], bounds[1::2], strict=False))))
        starts, lengths = torch.tensor([(start, stop - start) for start, stop in chosen]).T
        found = peer.get(FAR_PLACE, number, held, Runs(starts=starts, lengths=lengths))
        expected = values[held.tensor_slice.tensor].reshape(-1)[indices(starts, lengths)]
        assert found.keys() == {"weight"}
        assert found["weight"].dtype == expected.dtype
        assert torch.equal(found["weight"], expected)

    elements_come_as_they_are()
    assert there.reported == []


def all_of(held):
    return Runs(starts=torch.tensor([0]), lengths=torch.tensor([held.tensor_slice.size]))


def test_elements_of_a_changed_slice_are_not_sent(there):
    _, manifest = put(there.store, FAR_PLACE)
    changed, sound = manifest.held[:2]
    mapped(there.store, FAR_PLACE)[changed.entries[0].offset + 8] ^= 1
    peer = there.peer()
    with pytest.raises(WrongCopy, match=r"has far-3-e2-0, but a \(weight\) in it is not as it was written"):
        peer.get(FAR_PLACE, 0, changed, Runs(starts=torch.tensor([100]), lengths=torch.tensor([1])))
    (message,) = there.reported
    assert message.startswith("far-3-e2-0 holds a (weight) of step 5")
    assert torch.equal(peer.get(FAR_PLACE, 1, sound, all_of(sound))["weight"], some_values()["b"])


def test_a_removed_copy_is_not_sent(there):
    _, manifest = written(some_values())
    peer = there.peer()
    for _ in range(2):
        with pytest.raises(PeerTrouble, match="no longer"):
            peer.get(FAR_PLACE, 1, manifest.held[1], all_of(manifest.held[1]))


def test_a_newer_version_does_not_answer_for_an_older_one(there):
    _, manifest = put(there.store, FAR_PLACE)
    put(there.store, FAR_PLACE, some_values(1), step=6)
    with pytest.raises(PeerTrouble):
        there.peer().get(FAR_PLACE, 1, manifest.held[1], all_of(manifest.held[1]))


def test_a_newer_copy_with_fewer_slices_does_not_answer_for_an_older_one(tmp_path):
    with closing(There(tmp_path)) as there:
        _, manifest = put(there.store, FAR_PLACE)
        put(there.store, FAR_PLACE, {"a": torch.ones(3)}, step=6)
        with pytest.raises(PeerTrouble):
            there.peer().get(FAR_PLACE, 2, manifest.held[2], all_of(manifest.held[2]))


@pytest.mark.parametrize("stranger", [{"run": "another"}, {"secret": "guessed"}, {"secret": ""}])
def test_a_client_without_the_token_gets_nothing_and_leaves_nothing(there, stranger):
    _, manifest = put(there.store, FAR_PLACE)
    before = list(there.store.found())
    peer = there.peer(**stranger)
    with pytest.raises(PeerTrouble, match="cannot be reached"):
        peer.get(FAR_PLACE, 1, manifest.held[1], all_of(manifest.held[1]))
    until(lambda: there.reported)
    assert "127.0.0.1 asked for copies of 'run' and did not prove that it has the job's token" in there.reported[0]
    memory, other = written(some_values(1), step=6)
    with pytest.raises(PeerTrouble, match="cannot be reached"):
        peer.put(dataclasses.replace(FAR_PLACE, slot=4), other, memory, pace=no_pace)
    assert list(there.store.found()) == before


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        (5).to_bytes(8) + b"[1, 2",
        (2).to_bytes(8) + b"{}",
        (1 << 40).to_bytes(8),
        b"\0",
        (2).to_bytes(8) + b"[]",
    ],
)
@pytest.mark.parametrize("proved", [False, True])
def test_a_client_with_a_foreign_protocol_is_dropped(tmp_path, sent, proved):
    with closing(There(tmp_path)) as there:
        with socket.create_connection(there.server.address, timeout=PATIENCE_S) as connection:
            if proved:
                authenticate(connection, CREDENTIALS)
            connection.sendall(sent)
            with contextlib.suppress(OSError):  # the other side may have hung up by now
                connection.shutdown(socket.SHUT_WR)
                assert len(received_until_the_end(connection)) <= (0 if proved else 40), "a challenge, at most"
        memory, manifest = written(some_values())
        assert there.peer().put(FAR_PLACE, manifest, memory, pace=no_pace) == []


def test_a_server_that_never_answers_is_given_up_in_time():
    memory, manifest = written(some_values())
    with deaf_server() as (_, address):
        peer, began = Peer(address, run="run", secret=SECRET, timeout_s=0.2), time.monotonic()
        with pytest.raises(PeerTrouble, match="cannot be reached: timed out"):
            peer.put(FAR_PLACE, manifest, memory, pace=no_pace)
        assert time.monotonic() - began > 0.2
        with pytest.raises(PeerTrouble, match="cannot be reached: timed out"):
            peer.get(FAR_PLACE, 1, manifest.held[1], all_of(manifest.held[1]))
        peer.close()


def test_a_missing_server_is_reported():
    memory, manifest = written(some_values())
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
    peer = Peer(address, run="run", secret=SECRET, timeout_s=PATIENCE_S)
    with pytest.raises(PeerTrouble, match=rf"at 127\.0\.0\.1:{address[1]} cannot be reached"):
        peer.put(FAR_PLACE, manifest, memory, pace=no_pace)


def test_another_thread_can_abort_a_blocked_put():
    memory, manifest = written({"t": torch.ones(4 << 20)})
    caught = []

    def put_it():
        try:
            peer.put(FAR_PLACE, manifest, memory, pace=no_pace)
        except PeerTrouble as error:
            caught.append(str(error))

    with deaf_server() as (listening, address):
        peer = Peer(address, run="run", secret=SECRET, timeout_s=2 * PATIENCE_S)
        thread = threading.Thread(target=put_it)
        thread.start()
        connection, _ = listening.accept()
        with connection:
            as_server(connection, CREDENTIALS)
            assert connection.recv(1, socket.MSG_PEEK), "it is on its way"
            assert thread.is_alive()
            peer.give_up()
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    assert "cannot be reached" in caught[0]
    peer.give_up()


@pytest.mark.parametrize("proved", [False, True])
def test_a_server_that_closes_leaves_no_thread_and_no_connection(tmp_path, proved):
    there, before = There(tmp_path), threading.active_count()
    with socket.create_connection(there.server.address, timeout=PATIENCE_S) as idle:
        if proved:
            authenticate(idle, CREDENTIALS)
        until(lambda: there.server._open if proved else there.server.pending)
        there.close()
        assert len(received_until_the_end(idle)) <= 40, "a challenge, at most"
    assert threading.active_count() == before - 1
