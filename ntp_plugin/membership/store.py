"""The key-value store of the agreement, on any torch store (a TCPStore, or a prefix of the rendezvous' own).

Connections are opened at start and never during a recovery: opening one takes a name look-up, which can stall for
seconds just when name resolution is in trouble. A store object is one connection and serves one thread.

Any program that reaches torch's store may write to it. So each value is signed, with its key and the job's namespace,
by a token that only the job knows. A value without that signature is ignored: it is not read, and creating its key
overwrites it.

Values are compressed: the reports of all ranks are nearly alike, and all ranks read them from one server.
"""

import contextlib
import hashlib
import hmac
import socket
import zlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from ntp_plugin.errors import ConfigError, StoreLost


class KeyStore(Protocol):
    """A store of keys that are written once."""

    def read(self, key: str) -> str | None:
        """Return the value, or None while the key does not exist. Never waits."""

    def create(self, key: str, value: str) -> str:
        """Create the key unless it exists; return its value."""

    def present(self, keys: Sequence[str]) -> bool:
        """Return True if all these keys exist. Never waits."""


class TorchStore:
    """A `KeyStore` on one connection of a torch store, in the namespace of a job; raises `StoreLost` when the
    connection breaks."""

    def __init__(self, connection: Store, *, corner: str, token: str) -> None:
        self._store, self._corner = PrefixStore(corner, connection), corner
        self._token = hashlib.blake2b(token.encode(), digest_size=32).digest()

    def read(self, key: str) -> str | None:
        with _answered():
            found = look_up(self._store, key)
        return None if found is None else self._own(key, found)

    def create(self, key: str, value: str) -> str:
        signed, before = self._signed(key, value), b""
        while True:
            with _answered():
                found: bytes = self._store.compare_set(key, before, signed)  # type: ignore[arg-type]
            own = self._own(key, found)
            if own is not None:
                return own
            before = found

    def present(self, keys: Sequence[str]) -> bool:
        return all(self.read(key) is not None for key in keys)

    def count(self, key: str, more: int = 0) -> int:
        """Add to a counter, which begins at 0, and return it. For heartbeats: the one key that is not written once."""
        with _answered():
            return int(self._store.add(key, more))

    def refuse_strangers(self) -> None:
        """Raise `ConfigError` unless this process has the same token as the first one that came here."""
        mine = self._signature(_TOKEN, b"")
        with _answered():
            found: bytes = self._store.compare_set(_TOKEN, "", mine.decode())
        if not hmac.compare_digest(found, mine):
            raise ConfigError(
                f"another NTP_TOKEN is used in the corner {self._corner} of the job's store",
                fix="set NTP_TOKEN to the same value on all hosts of the job; another job needs another --rdzv-id",
            )

    def _signature(self, key: str, value: bytes) -> bytes:
        of = b"\0".join((self._corner.encode(), key.encode(), value))
        return hashlib.blake2b(of, key=self._token, digest_size=16).hexdigest().encode()

    def _signed(self, key: str, value: str) -> bytes:
        packed = zlib.compress(value.encode(), level=1)
        return self._signature(key, packed) + packed

    def _own(self, key: str, found: bytes) -> str | None:
        signature, packed = found[:_SIGNED], found[_SIGNED:]
        own = hmac.compare_digest(signature, self._signature(key, packed))
        return zlib.decompress(packed).decode() if own else None


def look_up(store: Store, key: str) -> bytes | None:
    """Return the value, or None, in one round trip (a check and a get take two). A value is never one zero byte."""
    value: bytes = store.compare_set(key, _UNSET, _UNSET)  # sets nothing: a missing key does not have this value
    return None if value == _UNSET.encode() else value


_UNSET = "\0"
_SIGNED = 32
"""Bytes of a signature."""
_TOKEN = "token"


@contextlib.contextmanager
def _answered() -> Iterator[None]:
    try:
        yield
    except DistError as error:
        reason = str(error).splitlines()[0]
        raise StoreLost(
            f"the job's store does not answer ({reason})",
            fix="restart the job from its last checkpoint; `ntp store` keeps a store outside of the nodes",
        ) from error


def serve(host: str, port: int) -> TCPStore:
    """Serve a store on this address alone, for as long as the object lives."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=4096)
    here = listener.getsockname()
    # torch takes ownership of the listening socket, and closes it.
    return TCPStore(host, here[1], None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def own_address(towards: tuple[str, int]) -> str:
    """Return the address by which this host reaches another one; nothing is sent."""
    family, kind, _, _, target = socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
