"""Sends and serves copies between hosts.

It uses its own sockets beside the job's groups, so that no copy can hold up a collective. Each process serves the
copies of its host, and receives those that others send to it. A request is a line of JSON, then bytes, and so is the
answer:

    put  a copy's manifest, as long as the request says, and its bytes; when all digests are right, they are kept as a
         copy or as a part of a parity
    get  some elements of a slice; they are verified before they are sent, and their own digest goes with them

Both ends first prove that they have the job's key (`handshake.py`). Until then only the proof is read, so a stranger
costs no memory, and a run of the same name with another key gets no answer. A malformed request ends its connection,
and nothing else.
"""

import contextlib
import dataclasses
import json
import logging
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ntp_plugin.copies import digest
from ntp_plugin.copies.handshake import HANDSHAKE_S, Credentials, Gatekeeper, authenticate
from ntp_plugin.copies.layout import DTYPES, CopyBatch
from ntp_plugin.copies.manifest import CopiedSlice, Manifest
from ntp_plugin.copies.parity import ParityStore, Unwanted
from ntp_plugin.copies.runs import Runs
from ntp_plugin.copies.slices import indices
from ntp_plugin.copies.store import FAR, PARITY, CopyKey, NoRoom, Store
from ntp_plugin.copies.table import AT_ONCE
from ntp_plugin.copies.verify import Checked, wrong, wrong_in
from ntp_plugin.errors import NtpError

CHUNK = 16 << 20
_VERIFIED_PER_S = 5e7
"""The least rate: a receiver answers when a copy is verified, and all members of a parity send at once."""
_LINE = 1 << 26
"""The largest line in bytes: a manifest has some hundred bytes for each tensor."""
_QUOTED = 50
"""The characters of a peer's text that go into a log."""
_MALFORMED = (
    OSError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)
_LOG = logging.getLogger(__name__)

type Address = tuple[str, int]
type Wrong = Callable[[str], None]
"""Called with what was found to be wrong with a copy that another process made."""


class PeerTrouble(NtpError):
    """Another host did not take a copy, or did not give one."""


class WrongCopy(NtpError):
    """A copy is not what was written."""


# ---------------------------------------------------------------- the server


class Server:
    """Receives and serves copies, on threads of its own."""

    def __init__(
        self,
        store: Store,
        *,
        run: str,
        secret: str,
        host: str,
        report: Wrong,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        """Listen at a free port of `host`.

        Args:
            store: Where copies are kept.
            run: The name of the run.
            secret: The job's secret: a client proves that it has it before a request is read.
            host: The address to listen on.
            told: Called with what was found to be wrong.
            handshake_s: The seconds that a client has for its proof.
        """
        self._store, self._report = store, report
        self._socket = socket.create_server((host, 0), backlog=64)
        self.address: Address = (host, self._socket.getsockname()[1])
        self._threads: list[threading.Thread] = []
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._one_at_a_time: defaultdict[CopyKey, threading.Lock] = defaultdict(threading.Lock)
        self._parities = ParityStore(store)
        self._closed = threading.Event()
        self._gatekeeper = Gatekeeper(
            self._socket,
            Credentials(run=run, secret=secret),
            admit=self._begin,
            report=report,
            handshake_s=handshake_s,
        )
        self._acceptor = threading.Thread(
            target=self._gatekeeper.run, args=(self._closed.wait,), name="ntp-copies-server", daemon=True
        )
        self._acceptor.start()

    @property
    def pending(self) -> int:
        """The number of connections whose clients have not proved that they have the job's key."""
        return self._gatekeeper.pending

    def close(self) -> None:
        """Stop serving."""
        self._closed.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._socket.close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _begin(self, connection: socket.socket) -> None:
        thread = threading.Thread(target=self._serve, args=(connection,), name="ntp-copies", daemon=True)
        with self._lock:
            self._open.add(connection)  # before it is served, so that `close` finds it
            try:
                thread.start()
            except RuntimeError:
                self._open.discard(connection)
                connection.close()
                raise
            self._threads = [*(one for one in self._threads if one.is_alive()), thread]

    def _serve(self, connection: socket.socket) -> None:
        try:
            while (request := _read_line(connection)) is not None:
                if not isinstance(request, dict):
                    raise ValueError("a request that is not an object")
                {"put": self._put, "get": self._get}[request["do"]](connection, request)
        except _MALFORMED as error:
            _LOG.info("a connection for copies ended: %s", error)  # the client notices, and asks elsewhere
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _put(self, connection: socket.socket, request: Mapping[str, Any]) -> None:
        text = _read_bytes(connection, int(request["manifest"]))
        manifest = Manifest.decode(text)
        if manifest is None or not manifest.layout.is_sound or manifest.layout.end > manifest.size:
            raise ValueError("a manifest arrived wrong")
        place, coming = _place(request, FAR, PARITY), _Arriving(connection, manifest)
        try:
            if place.kind == PARITY:
                found = self._parities.take(place, tuple(request["members"]), manifest, coming.batches())
            else:
                found = self._take(place, manifest, text, coming)
        except (NoRoom, Unwanted) as error:
            self._report(str(error))
            answer: dict[str, Any] = {"refused" if isinstance(error, NoRoom) else "unwanted": str(error)}
        else:
            if found:
                self._report(f"slot {manifest.slot} sent {found[0]} of {manifest.version}, which arrived wrong")
            answer = {"wrong": found}
        coming.skip_to(manifest.size)
        _send_line(connection, answer)

    def _take(self, place: CopyKey, manifest: Manifest, text: bytes, coming: "_Arriving") -> list[str]:
        """Receive a copy, and return which of its values arrived wrong."""
        with self._one_at_a_time[place]:
            memory = self._store.open(place, manifest.size)
            found = coming.whole(memory)
            if not found:
                self._store.complete_raw(place, text)
        return found

    def _get(self, connection: socket.socket, request: Mapping[str, Any]) -> None:
        wanted = torch.empty(2, request["runs"], dtype=torch.int64)
        _receive(connection, wanted.view(-1).view(torch.uint8))
        place = _place(request)
        manifest = self._store.manifest(place)
        held = next(iter(manifest.held[request["piece"] :][:1]), None) if manifest is not None else None
        if manifest is None or held is None or _written(held) != request["written"]:
            _send_line(connection, {"gone": True})
            return
        if not _is_within(held.tensor_slice.size, starts=wanted[0], lengths=wanted[1]):
            raise ValueError(
                f"a request for elements beyond the {held.tensor_slice.size} of {held.tensor_slice.tensor}"
            )
        values = self._store.read(place, held)
        found = wrong(manifest, held, values)
        if found:
            self._report(f"{place} holds {found[0]} of {manifest.version}, which is not as it was written")
            _send_line(connection, {"wrong": found})
            return
        selected = select(values, starts=wanted[0], lengths=wanted[1])
        numbers = _digests(selected, Runs(starts=wanted[0], lengths=wanted[1]))
        _send_line(connection, {"wrong": [], "digests": numbers})
        for those in selected.values():
            _send(connection, those.view(torch.uint8))


class _Arriving:
    """The bytes of a copy that is arriving."""

    def __init__(self, connection: socket.socket, manifest: Manifest) -> None:
        self._connection, self._manifest, self._at = connection, manifest, 0
        self._room = torch.empty(0, dtype=torch.uint8)

    def whole(self, memory: torch.Tensor) -> list[str]:
        """Receive all bytes, and return which values arrived wrong."""
        checked = Checked.begun(memory, self._manifest)
        if checked is None:
            self._into(memory)
            return wrong_in(memory, self._manifest)
        for start in range(0, len(memory), AT_ONCE):
            self._into(memory[start : start + AT_ONCE])
            checked.come(self._at)
        return checked.wrong()

    def batches(self) -> Iterator[tuple[CopyBatch, torch.Tensor]]:
        """Yield batches of slices with their bytes, in memory that the next batch reuses."""
        for batch in self._manifest.layout.batches:
            self.skip_to(batch.begin)
            if self._room.numel() < batch.end - batch.begin:
                self._room = torch.empty(batch.end - batch.begin, dtype=torch.uint8)
            memory = self._room[: batch.end - batch.begin]
            self._into(memory)
            yield batch, memory

    def _into(self, memory: torch.Tensor) -> None:
        _receive(self._connection, memory)
        self._at += len(memory)

    def skip_to(self, offset: int) -> None:
        """Discard the bytes before this one."""
        if offset != self._at:
            _drain(self._connection, offset - self._at)
            self._at = offset


def select(
    values: Mapping[str, torch.Tensor], *, starts: torch.Tensor, lengths: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Some elements of a slice, by their indices in it, entry by entry."""
    if len(starts) == 1:
        first, size = int(starts[0]), int(lengths[0])
        return {name: those[first : first + size] for name, those in values.items()}
    index = indices(starts, lengths)
    return {name: those[index] for name, those in values.items()}


def _place(request: Mapping[str, Any], *kinds: str) -> CopyKey:
    """The key in a request, if a copy of one of these kinds may have it; another name could lead to another folder."""
    place = CopyKey(**request["place"])
    if CopyKey.read(str(place)) is None or (kinds and place.kind not in kinds):
        raise ValueError(f"{str(place)[:_QUOTED]!r} is no name of a copy")
    return place


def _is_within(size: int, *, starts: torch.Tensor, lengths: torch.Tensor) -> bool:
    """Whether these runs are within the slice, and together no longer: as much memory is taken as they ask for."""
    if not len(starts):
        return True
    ends_within = starts.min() >= 0 and lengths.min() >= 0 and starts.max() <= size and lengths.max() <= size
    return bool(ends_within and (starts + lengths).max() <= size and lengths.sum() <= size)


def _written(held: CopiedSlice) -> list[int]:
    """The digests that tell this version of a slice from another that has replaced it."""
    return [entry.digest for entry in held.entries]


def _digests(values: Mapping[str, torch.Tensor], runs: Runs) -> list[int]:
    """Digests of values on the wire, by their places in the slice."""
    return digest.digests(list(values.values()), runs, salts=list(values))


# ---------------------------------------------------------------- the client


class Peer:
    """The server of another process."""

    def __init__(self, address: Address, *, run: str, secret: str, timeout_s: float) -> None:
        self._address, self._credentials = address, Credentials(run=run, secret=secret)
        self._timeout_s = timeout_s
        self._connection: socket.socket | None = None
        self._given_up = False

    def put(
        self,
        place: CopyKey,
        manifest: Manifest,
        memory: torch.Tensor,
        *,
        pace: Callable[[int], None],
        members: Sequence[int] = (),
    ) -> list[str]:
        """Send a copy, or a part of the parity of these members; returns which of its values arrived wrong."""
        with self._connected() as connection:
            text = manifest.encode()
            of = {"place": dataclasses.asdict(place), "manifest": len(text), "members": list(members)}
            _send_line(connection, {"do": "put"} | of, text)
            connection.settimeout(self._timeout_s + max(1, len(members)) * manifest.size / _VERIFIED_PER_S)
            for start in range(0, manifest.size, CHUNK):
                chunk = memory[start : min(start + CHUNK, manifest.size)]
                _send(connection, chunk)
                pace(len(chunk))
            answer = self._answer(connection)
            connection.settimeout(self._timeout_s)
        if "refused" in answer:
            raise PeerTrouble(f"{self} has no room: {answer['refused']}")
        if "unwanted" in answer:
            raise PeerTrouble(f"{self} did not take it: {answer['unwanted']}")
        found: list[str] = answer["wrong"]
        return found

    def get(self, place: CopyKey, number: int, held: CopiedSlice, runs: Runs) -> dict[str, torch.Tensor]:
        """Get elements of slice `number` of a copy; raises if the copy is not what was written."""
        with self._connected() as connection:
            request = {"do": "get", "place": dataclasses.asdict(place), "piece": number, "runs": len(runs.starts)}
            request["written"] = _written(held)
            _send_line(connection, request)
            _send(connection, torch.stack([runs.starts, runs.lengths]).view(-1).view(torch.uint8))
            answer = self._answer(connection)
            if "gone" in answer:
                raise PeerTrouble(f"{self} no longer has {place}")
            if answer["wrong"]:
                raise WrongCopy(f"{self} has {place}, but {answer['wrong'][0]} in it is not as it was written")
            values = {entry.name: torch.empty(runs.size, dtype=DTYPES[entry.dtype]) for entry in held.entries}
            for received in values.values():
                _receive(connection, received.view(torch.uint8))
        if _digests(values, runs) != answer["digests"]:
            raise PeerTrouble(f"{self} sent a part of {held.tensor_slice.tensor}, which arrived wrong")
        return values

    def give_up(self) -> None:
        """Make the request under way fail; any thread may call this."""
        connection, self._given_up = self._connection, True
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __str__(self) -> str:
        return f"the process at {self._address[0]}:{self._address[1]}"

    @contextlib.contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        try:
            if self._given_up:
                self.close()
                self._given_up = False
            if self._connection is None:
                self._connection = socket.create_connection(self._address, timeout=self._timeout_s)
                self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                authenticate(self._connection, self._credentials)
            yield self._connection
        except (OSError, ValueError, KeyError) as error:
            self.close()
            raise PeerTrouble(f"{self} cannot be reached: {error}") from error

    def _answer(self, connection: socket.socket) -> dict[str, Any]:
        answer = _read_line(connection)
        if answer is None:
            raise ConnectionResetError("it hung up")
        return answer


# ---------------------------------------------------------------- bytes


def _send_line(connection: socket.socket, message: Mapping[str, Any], then: bytes = b"") -> None:
    text = json.dumps(message).encode()
    connection.sendall(len(text).to_bytes(8) + text + then)


def _read_line(connection: socket.socket) -> dict[str, Any] | None:
    """The next line; None if the other side has hung up."""
    head = bytearray(8)
    if not _receive_into(connection, memoryview(head), may_end=True):
        return None
    message: dict[str, Any] = json.loads(_read_bytes(connection, int.from_bytes(head)))
    return message


def _read_bytes(connection: socket.socket, size: int) -> bytes:
    if not 0 <= size <= _LINE:
        raise ValueError(f"a line of {size} bytes")
    text = bytearray(size)
    _receive_into(connection, memoryview(text))
    return bytes(text)


def _send(connection: socket.socket, values: torch.Tensor) -> None:
    connection.sendall(memoryview(values.contiguous().numpy()))


def _receive(connection: socket.socket, values: torch.Tensor) -> None:
    _receive_into(connection, memoryview(values.numpy()))


def _receive_into(connection: socket.socket, memory: memoryview, *, may_end: bool = False) -> bool:
    at = 0
    while at < len(memory):
        count = connection.recv_into(memory[at : at + CHUNK])
        if not count:
            if may_end and not at:
                return False
            raise ConnectionResetError("it hung up")
        at += count
    return True


def _drain(connection: socket.socket, size: int) -> None:
    scratch = torch.empty(min(size, CHUNK), dtype=torch.uint8)
    while size:
        part = scratch[: min(size, CHUNK)]
        _receive(connection, part)
        size -= len(part)
