"""Values without the signature of the job's token are ignored: no other process can speak for the job."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ntp_plugin.errors import ConfigError
from ntp_plugin.membership.protocol import View
from ntp_plugin.membership.store import TorchStore, serve
from tests.ranks.command import NTP, RECIPES, Command, last_line

CORNER = "ntp/a job"


@pytest.fixture
def server():
    return serve("127.0.0.1", 0)


def connection(server):
    return TCPStore("127.0.0.1", server.port, None, False)


def store(server, *, corner=CORNER, token="its token"):
    return TorchStore(connection(server), corner=corner, token=token)


def unsigned_values(server):
    """Values from a writer who knows all but the token; the last two are what the job has signed for another key, and
    what another job of the same token has signed."""
    raw, value = PrefixStore(CORNER, connection(server)), View(epoch=1, member_ids=()).encode()
    store(server).create("view/2", value)
    store(server, corner="ntp/another").create("view/1", value)
    other = PrefixStore("ntp/another", connection(server)).get("view/1")
    signed_by_another = store(server, token="another")._signature("view/1", value.encode()) + value.encode()
    return [b"\xff\x00garbage", value.encode(), b"0" * 32 + value.encode(), signed_by_another, raw.get("view/2"), other]


def test_unsigned_values_are_ignored_and_overwritten(server):
    raw, own = PrefixStore(CORNER, connection(server)), store(server)
    for words in unsigned_values(server):
        key = "view/1"
        raw.set(key, words)
        assert own.read(key) is None
        assert not own.present([key])
        assert own.create(key, "ours") == "ours"
        assert store(server).create(key, "too late") == store(server).read(key) == "ours"


def test_ten_thousand_unsigned_values_are_ignored(server):
    """Some differ from a signed value in one byte."""
    raw, own, dice = PrefixStore(CORNER, connection(server)), store(server), random.Random(1)
    own.create("signed", "its value")
    signed = raw.get("signed")
    for number in range(10_000):
        spoilt = bytearray(signed)
        spoilt[dice.randrange(len(spoilt))] ^= 1 << dice.randrange(8)
        words = dice.choice([bytes(spoilt), bytes(dice.randrange(256) for _ in range(dice.randrange(80))), signed[:-1]])
        raw.compare_set(f"key/{number}", "", words)
        assert own.read(f"key/{number}") is None
    assert own.read("signed") == "its value"


def test_concurrent_writers_over_unsigned_values_agree(server):
    for number in range(50):
        PrefixStore(CORNER, connection(server)).set(f"view/{number}", "a stranger's")
        stores = [store(server) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            found = pool.map(lambda pair, key=f"view/{number}": pair[1].create(key, f"{pair[0]}"), enumerate(stores))
        assert len({*found}) == 1


def test_a_host_with_another_token_is_refused(server):
    store(server).refuse_strangers()
    store(server).refuse_strangers()
    with pytest.raises(ConfigError, match=r"another NTP_TOKEN .*ntp/a job"):
        store(server, token="another").refuse_strangers()


def test_an_unsigned_end_of_the_job_is_ignored(tmp_path):
    """The writer has all that a process of another user could have, and more: the port, and the name of the run."""
    words = [*NTP, "run", "--standalone", "--nproc-per-node=2", str(RECIPES / "train.py")]
    job = Command(words, tmp_path / "log", STEPS="40", PAUSE_S="0.1")
    job.wait_for(r"slot 1 is pid \d+")
    pid = int(job.wait_for(r"slot 0 is pid (\d+)").group(1))
    variables = dict(pair.split("=", 1) for pair in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in pair)
    stranger = TCPStore("127.0.0.1", int(variables["MASTER_PORT"]), None, False)
    corner = PrefixStore(f"ntp/{variables['TORCHELASTIC_RUN_ID']}", stranger)
    corner.set("view/1", View(epoch=1, member_ids=(), over=True).encode())
    corner.set("done/0/0", "done")
    corner.set("word/units", json.dumps("a stranger's"))
    code, output = job.end()
    assert code == 0, output
    assert "step 40:" in output, output
    assert last_line(output)[2] == "(0, 1)"
