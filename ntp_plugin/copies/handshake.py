"""Mutual authentication of the two ends of a connection for copies, by a key that only the job's processes have.

    server -> client   MAGIC, and 32 random bytes of the server's
    client -> server   32 random bytes of the client's, and HMAC-SHA256(key, "client" | run | both)
    server -> client   HMAC-SHA256(key, "server" | run | both)

The key itself never goes over the wire, and a recorded handshake is worth nothing in another connection. The client
sends no training state before the server has proved itself: another process may have taken a dead server's port.

A connection costs the server a file descriptor and less than a kilobyte until the client has proved itself. No thread
is started for it. It has `HANDSHAKE_S` in all, and at most `PENDING` of them are open at once: one more closes the
oldest, so strangers who connect and stay silent cannot keep members out.

What follows the handshake is neither encrypted nor signed (docs/security.md).
"""

import contextlib
import dataclasses
import hashlib
import hmac
import logging
import secrets
import selectors
import socket
import time
from collections.abc import Callable

HANDSHAKE_S = 10.0
"""Seconds from the connection to the client's proof: a fully loaded processor answers within a second."""
PENDING = 64
"""The number of connections that may be open without a proof."""
_REPORT_EVERY_S = 60.0
"""Failed proofs are reported once in this time, with their number: strangers must not fill the job's record."""
_MAGIC = b"ntp-cop1"
_RANDOM = 32
_PROOF = hashlib.sha256().digest_size
_FULL_S = 0.1
"""Seconds until another attempt to accept a connection for which the host had no descriptor or no thread."""
_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """What both ends know: the name of the run, and the job's key.

    Args:
        run: The name of the run. It is no secret.
        secret: What the key is derived from: a random string of the job's.
    """

    run: str
    secret: str = dataclasses.field(repr=False)

    def proof(self, side: bytes, servers: bytes, clients: bytes) -> bytes:
        """The bytes by which a side (`b"client"` or `b"server"`) proves that it has the key, in this connection."""
        of = b"\0".join((side, hashlib.sha256(self.run.encode()).digest(), servers + clients))
        return hmac.digest(self.secret.encode(), of, "sha256")


def authenticate(connection: socket.socket, credentials: Credentials) -> None:
    """Run the client's half of the handshake on a connected socket; it waits no longer than the socket's timeout.

    Raises:
        OSError: The server hung up, as it does on a client with another key, or did not answer in time.
        ValueError: The other side is no server of copies, or has another key.
    """
    challenge = _receive(connection, len(_MAGIC) + _RANDOM)
    if not challenge.startswith(_MAGIC):
        raise ValueError("it is no server of copies of this version")
    servers, clients = challenge[len(_MAGIC) :], secrets.token_bytes(_RANDOM)
    connection.sendall(clients + credentials.proof(b"client", servers, clients))
    if not hmac.compare_digest(_receive(connection, _PROOF), credentials.proof(b"server", servers, clients)):
        raise ValueError("it has another NTP_TOKEN, or belongs to another run")


def _receive(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = connection.recv(size - len(found))
        if not more:
            raise ConnectionResetError("it hung up before it had proved that it has the job's token")
        found += more
    return found


@dataclasses.dataclass(kw_only=True, slots=True)
class _Pending:
    """A connection whose client has not proved itself."""

    connection: socket.socket
    address: str
    until: float
    challenge: bytes
    answer: bytes = b""

    def is_complete(self) -> bool:
        """Read what has come, without waiting, and return whether the answer is complete. Raises OSError on a
        hang-up."""
        with contextlib.suppress(BlockingIOError):
            more = self.connection.recv(_RANDOM + _PROOF - len(self.answer))
            if not more:
                raise ConnectionResetError("it hung up before it had proved that it has the job's token")
            self.answer += more
        return len(self.answer) == _RANDOM + _PROOF


class Gatekeeper:
    """The server's half of all handshakes, on the one thread that accepts connections."""

    def __init__(
        self,
        listener: socket.socket,
        credentials: Credentials,
        *,
        admit: Callable[[socket.socket], None],
        report: Callable[[str], None],
        handshake_s: float = HANDSHAKE_S,
        pending: int = PENDING,
    ) -> None:
        """Make one; `run` does the work.

        Args:
            listener: The listening socket; the caller closes it.
            credentials: What clients have to prove that they know.
            admit: Takes over a connection whose client has proved itself. It may raise RuntimeError or OSError where
                there is no thread for it; it has closed the connection then.
            report: Called with one line when a client has failed to prove itself, at most once a minute.
            handshake_s: The seconds that a handshake may take.
            pending: The handshakes that may be under way at once.
        """
        self._listener, self._credentials, self._admit, self._report = listener, credentials, admit, report
        self._handshake_s, self._most = handshake_s, pending
        self._pending: dict[socket.socket, _Pending] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._failed, self._reports_at = 0, 0.0

    @property
    def pending(self) -> int:
        """The number of connections whose clients have not proved themselves."""
        return len(self._pending)

    def run(self, closed: Callable[[float], bool]) -> None:
        """Accept and authenticate until the server is closed.

        Args:
            closed: Waits up to the given seconds for the server to be closed, and returns whether it is. Closing also
                shuts the listener down, which wakes this thread.
        """
        listener = self._listener
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        try:
            while not closed(0):
                for key, _ in self._selector.select(self._next_deadline()):
                    try:
                        if key.fileobj is listener:
                            self._accept()
                        else:
                            self._hear(key.fileobj)  # type: ignore[arg-type]
                    except (OSError, RuntimeError) as error:  # the server was closed, or too many files are open
                        if not closed(_FULL_S):
                            _LOG.warning("a connection for copies was not taken: %s", error)
                self._drop_late_ones()
        finally:
            for connection in list(self._pending):
                self._drop(connection)
            self._selector.close()

    def _next_deadline(self) -> float | None:
        oldest = next(iter(self._pending.values()), None)
        return None if oldest is None else max(0.0, oldest.until - time.monotonic())

    def _accept(self) -> None:
        connection, address = self._listener.accept()
        if len(self._pending) >= self._most:
            self._drop(next(iter(self._pending)))
        made = _Pending(
            connection=connection,
            address=str(address[0]),
            until=time.monotonic() + self._handshake_s,
            challenge=secrets.token_bytes(_RANDOM),
        )
        self._pending[connection] = made
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(connection, selectors.EVENT_READ)
            connection.send(_MAGIC + made.challenge)  # fits into the buffer of a new connection
        except OSError:  # it hung up at once
            self._drop(connection)

    def _hear(self, connection: socket.socket) -> None:
        made = self._pending.get(connection)
        if made is None:  # it was dropped for a newer one
            return
        try:
            if not made.is_complete():
                return
        except OSError as error:
            _LOG.info("a connection for copies ended: %s", error)
            self._drop(connection)
            return
        clients, proof = made.answer[:_RANDOM], made.answer[_RANDOM:]
        if not hmac.compare_digest(proof, self._credentials.proof(b"client", made.challenge, clients)):
            self._drop(connection)
            self._report_failure(made.address)
            return
        self._selector.unregister(connection)
        del self._pending[connection]
        try:
            connection.send(self._credentials.proof(b"server", made.challenge, clients))
        except OSError:
            connection.close()
            return
        connection.setblocking(True)
        self._admit(connection)

    def _report_failure(self, address: str) -> None:
        self._failed += 1
        now = time.monotonic()
        if now < self._reports_at:
            return
        self._report(
            f"{address} asked for copies of {self._credentials.run!r} and did not prove that it has the job's token"
            f" ({self._failed} such connections so far)"
        )
        self._reports_at = now + _REPORT_EVERY_S

    def _drop_late_ones(self) -> None:
        now = time.monotonic()
        while (oldest := next(iter(self._pending.values()), None)) is not None and oldest.until <= now:
            _LOG.info("a connection for copies ended: no proof within %g s", self._handshake_s)
            self._drop(oldest.connection)

    def _drop(self, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):  # it was not registered
            self._selector.unregister(connection)
        del self._pending[connection]
        connection.close()
