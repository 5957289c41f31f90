"""Signs the state of torch's rendezvous, so that torch reads only what a process of the job has written.

torch keeps the state of a rendezvous in the job's store as a pickle, and reads it again every few seconds as long as
the job runs. Any process that reaches the store could put another pickle there, and have `ntp run` execute it. So the
state is signed with the job's token, and bytes without a valid signature never reach torch. In their place torch gets
the last valid state that this process knows, and the next write overwrites them.
"""

import hashlib
import hmac
from typing import Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

_DIGEST = 32


class SignedBackend(RendezvousBackend):
    """A rendezvous backend of torch that signs the states it writes and checks those it reads.

    Args:
        backend: torch's own backend.
        secret: The job's token.
        run_id: The job's name. It is signed as well, so that the state of another job is not valid.
    """

    def __init__(self, backend: RendezvousBackend, *, secret: str, run_id: str) -> None:
        self._backend = backend
        self._key = hashlib.blake2b(secret.encode(), digest_size=32, person=b"ntp rendezvous").digest()
        self._run_id = run_id.encode()
        self._last: bytes | None = None
        """The newest state with a valid signature."""

    @property
    def name(self) -> str:
        """The name of torch's backend."""
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state that a process of the job has written, with the token by which it can be replaced."""
        found = self._backend.get_state()
        if found is None:
            return None
        self._last = self._opened(found[0]) or self._last
        return None if self._last is None else (self._last, found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Replace the state that has this token. A state without a valid signature is replaced in any case."""
        signed = self._signature(state) + state
        found = self._backend.set_state(signed, token)
        if found is not None and self._opened(found[0]) is None:
            found = self._backend.set_state(signed, found[1])
        if found is None:
            return None
        self._last = self._opened(found[0]) or self._last
        return None if self._last is None else (self._last, found[1], found[2])

    def _signature(self, state: bytes) -> bytes:
        return hashlib.blake2b(self._run_id + b"\0" + state, key=self._key, digest_size=_DIGEST).digest()

    def _opened(self, signed: bytes) -> bytes | None:
        signature, state = signed[:_DIGEST], signed[_DIGEST:]
        return state if hmac.compare_digest(signature, self._signature(state)) else None


def sign(handler: Any, *, secret: str) -> None:
    """Make a rendezvous handler of torch read and write signed states. A handler without state in the store is not
    changed."""
    holder = getattr(handler, "_state_holder", None)
    if holder is not None and not isinstance(holder._backend, SignedBackend):
        holder._backend = SignedBackend(holder._backend, secret=secret, run_id=handler.get_run_id())
