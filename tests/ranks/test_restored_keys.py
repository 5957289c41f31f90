"""Keys of the job's store that another process deletes or overwrites are written again, and a log line names them."""

import os
import signal
import time

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ntp_plugin.errors import StoreLost
from ntp_plugin.membership.agreement import Agreement, publish_lost
from ntp_plugin.membership.protocol import newest_view, view_key
from ntp_plugin.membership.restored_keys import RestoredKeys
from ntp_plugin.membership.store import serve
from ntp_plugin.recovery.rank_context import first_view
from ntp_plugin.telemetry import Follower, KeyRestored
from tests.ranks.command import NTP, PAUSED, RECIPES, Command, last_line
from tests.ranks.test_store_token import CORNER, connection, store

ENOUGH = 2000
"""Polls of a waiting member: some seconds."""


class Process:
    """One of the job, with what it reports."""

    def __init__(self, server):
        self.reported = []
        self.keys = RestoredKeys(store(server), report=lambda key, what: self.reported.append((key, what)))

    def wait(self, key="view/99", looks=ENOUGH):
        for _ in range(looks):
            assert self.keys.read(key) is None


@pytest.fixture
def server():
    return serve("127.0.0.1", 0)


@pytest.fixture
def process(server):
    return Process(server)


@pytest.fixture
def outsider(server):
    return PrefixStore(CORNER, connection(server))


def views_of(process, epochs):
    view = first_view(epochs + 1)
    for epoch in range(epochs):
        view = publish_lost(process.keys, view, [view.member_ids[-1]])
        assert view.epoch == epoch + 1
    return view


def test_a_deleted_key_is_restored_when_it_is_read(process, outsider):
    process.keys.create("view/1", "its value")
    outsider.delete_key("view/1")
    assert process.keys.read("view/1") == "its value"
    ((key, what),) = process.reported
    assert key == "view/1"
    assert what.startswith("key view/1 of the job's store was deleted or overwritten, and was written again")


@pytest.mark.parametrize("how", ["deleted", "overwritten"])
def test_a_waiting_member_rewrites_all_views_that_it_knows(process, outsider, server, how):
    """A supervisor does; its ranks learn the newest epoch from shared memory, and read it in the store."""
    newest = views_of(process, 3)
    for epoch in (1, 2, 3):
        if how == "deleted":
            assert outsider.delete_key(view_key(epoch))
        else:
            outsider.set(view_key(epoch), "a stranger's")
    rank = Agreement.founding(store(server), first_view(4), first_view(4).member_ids[0])
    assert not rank.newer_view_exists()
    process.wait(view_key(4))
    assert rank.newer_view_exists()
    assert newest_view(store(server).read, first_view(4)) == newest
    assert {key for key, _ in process.reported} == {"view/1", "view/2", "view/3"}


def test_a_key_deleted_repeatedly_is_reported_once(process, outsider):
    process.keys.create("view/1", "its value")
    for _ in range(20):
        outsider.delete_key("view/1")
        assert process.keys.read("view/1") == "its value"
    assert len(process.reported) == 1


def test_another_signed_value_for_a_known_key_ends_the_process(process, outsider, server):
    process.keys.create("view/1", "its value")
    outsider.delete_key("view/1")
    store(server).create("view/1", "of one who did not know it")
    with pytest.raises(StoreLost, match="key view/1 of the job's store was deleted and created anew with"):
        process.keys.read("view/1")
    with pytest.raises(StoreLost, match="view/1"):
        process.keys.create("view/1", "its value")


def test_the_first_writer_decides_and_others_read_its_value(process, server):
    other = Process(server)
    assert other.keys.create("view/1", "first") == "first"
    assert process.keys.create("view/1", "second") == "first"
    assert process.keys.read("view/1") == "first"
    assert process.keys.present(["view/1"])
    assert not process.keys.present(["view/1", "view/2"])
    assert process.reported == other.reported == []


def test_only_the_newest_epochs_and_all_views_are_remembered(process):
    for epoch in range(1, 200):
        process.keys.create(f"view/{epoch}", str(epoch))
        for slot in range(5):
            process.keys.create(f"report/{epoch}/{slot}", "")
    process.keys.create("word/units", "")
    known = set(process.keys._known)
    assert {f"view/{epoch}" for epoch in range(1, 200)} | {"word/units"} <= known
    assert {key for key in known if key.startswith("report")} == {
        f"report/{e}/{s}" for e in (198, 199) for s in range(5)
    }


def test_a_waiting_member_sends_an_eighth_more_requests(server):
    class Counted:
        asked = 0

        def __init__(self, inner):
            self._inner, self.create = inner, inner.create

        def read(self, key):
            self.asked += 1
            return self._inner.read(key)

    counted = Counted(store(server))
    keys = RestoredKeys(counted, report=lambda *_: pytest.fail("nobody has deleted anything"))
    keys.create("view/1", "its value")
    for _ in range(800):
        assert keys.read("view/2") is None
    assert counted.asked == 900


def test_survivors_recover_although_another_process_deletes_the_view(tmp_path):
    """The supervisor writes the view again, and logs it; nothing logged it before."""
    words = [*NTP, "run", "--standalone", "--nproc-per-node=3", f"--ntp-run-dir={tmp_path / 'run'}", str(PAUSED)]
    job = Command(words, tmp_path / "log", STEPS="400", PAUSE_S="0.1", RECIPE=str(RECIPES / "train.py"))
    pids = [int(job.wait_for(rf"slot {slot} is pid (\d+)")[1]) for slot in range(3)]
    with open(f"/proc/{pids[0]}/environ") as file:  # noqa: PTH123
        variables = dict(pair.split("=", 1) for pair in file.read().split("\0") if "=" in pair)
    theirs = PrefixStore(
        f"ntp/{variables['TORCHELASTIC_RUN_ID']}", TCPStore("127.0.0.1", int(variables["MASTER_PORT"]), None, False)
    )
    os.kill(pids[2], signal.SIGKILL)
    deadline = time.monotonic() + 300
    while not theirs.delete_key("view/1"):  # at once when it is there: the ranks shall not have read it
        assert time.monotonic() < deadline, job.output
    job.go_on()
    code, output = job.end()
    assert code == 0, output
    assert last_line(output)[2] == "(0, 1)"
    assert "key view/1 of the job's store was deleted or overwritten, and was written again" in output
    assert {
        one.event.key
        for path in (tmp_path / "run").rglob("events*")
        for one in Follower(path).news()
        if isinstance(one.event, KeyRestored)
    } == {"view/1"}
