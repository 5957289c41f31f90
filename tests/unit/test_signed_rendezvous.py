"""torch's rendezvous unpickles its state; it must not unpickle that of an outsider who reaches the store."""

import base64
import os
import pickle

import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from ntp_plugin.launch.signed_rendezvous import SignedBackend, sign

SECRET, RUN = "a token of the job", "run"


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def client(store):
    return TCPStore("127.0.0.1", store.port, None, False)


def backend(store, *, secret=SECRET, run=RUN):
    return SignedBackend(C10dRendezvousBackend(client(store), "run"), secret=secret, run_id=run)


def plant(store, content):
    """Write as an outsider who knows the key and no secret."""
    client(store).set("torch.rendezvous.run", base64.b64encode(content).decode())


def test_two_members_read_each_others_values(store):
    one, other = backend(store), backend(store)
    assert one.get_state() is None
    assert one.set_state(b"first")[::2] == (b"first", True)
    state, token = other.get_state()
    assert state == b"first"
    assert other.set_state(b"second", token)[::2] == (b"second", True)
    assert one.set_state(b"late", token)[::2] == (b"second", False)


def test_unsigned_values_are_ignored_and_overwritten(store):
    one, other = backend(store), backend(store)
    one.set_state(b"first")
    for content in (b"planted", b"x" * 32 + b"planted"):
        plant(store, content)
        state, token = one.get_state()
        assert state == b"first"
        assert other.get_state() is None
        assert one.set_state(b"second", token)[::2] == (b"second", True)
        plant(store, content)
        assert one.set_state(b"first", b"a token of before")[::2] == (b"first", True)
        assert backend(store).get_state()[0] == b"first"


def test_a_state_signed_for_another_secret_or_job_is_rejected(store):
    backend(store).set_state(b"first")
    assert backend(store, secret="another one").get_state() is None
    assert backend(store, run="another").get_state() is None


class Executed:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("signed", [True, False])
def test_a_torch_handler_executes_no_planted_pickle(store, tmp_path, signed):
    """Without the signature it does: the control."""
    plain = C10dRendezvousBackend(client(store), RUN)
    handler = DynamicRendezvousHandler.from_backend(RUN, client(store), plain, 1, 1, "localhost")
    if signed:
        sign(handler, secret=SECRET)
        sign(handler, secret=SECRET)
        assert isinstance(handler._state_holder._backend._backend, C10dRendezvousBackend)
    handler.next_rendezvous()
    plant(store, pickle.dumps(Executed(tmp_path / "executed")))
    handler._state_holder._cache_duration = 0
    if signed:
        assert handler._state_holder.sync() is None
        assert handler._state_holder.state.participants
    else:
        with pytest.raises(AttributeError):
            handler._state_holder.sync()
    assert (tmp_path / "executed").exists() is not signed
    handler._stop_heartbeats()
