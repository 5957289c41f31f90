"""How supervisors on all hosts end a job because of an error of one rank's script."""

import pytest

from ntp_plugin.errors import ScriptError
from ntp_plugin.launch.script_errors import ScriptErrors
from ntp_plugin.membership.protocol import MemberId
from ntp_plugin.recovery.script_failure import ScriptFailure

FAILURE = ScriptFailure(
    kind="ValueError", message="wrong\nsecond line", place="train.py:3 in train", traceback="trace\n"
)
FIRST, SECOND = MemberId(slot=1, incarnation="1/0"), MemberId(slot=1, incarnation="1/1")


class Keys(dict):
    """A `KeyStore`."""

    def create(self, key, value):
        return self.setdefault(key, value)

    def read(self, key):
        return self.get(key)

    def present(self, keys):
        return all(key in self for key in keys)


@pytest.fixture
def host(tmp_path):
    """One of two, and what it says."""
    (tmp_path / "7.json").write_text(FAILURE.encode())

    def make(store, number=0, on_error="stop"):
        log = []
        errors = ScriptErrors(store, tmp_path, on_error=on_error, host=number, hosts=2, log=log.append)
        return errors, log

    return make


def test_all_hosts_end_with_the_error_of_one(host):
    store = Keys()
    errors, log = host(store)
    other, log_there = host(store, 1)
    other.look(now=1.0)
    with pytest.raises(ScriptError, match=r"slot 1 ended by .*: ValueError: wrong \(train.py:3 in train\)"):
        errors.judge(FIRST, 7, is_member=True, beside_a_loss=False, others_are_done=False)
    assert log == ["slot 1 (pid 7) failed:\ntrace"]
    other.look(now=1.1)  # it looks from time to time
    with pytest.raises(ScriptError, match="slot 1 ended by an error of its own script: ValueError: wrong"):
        other.look(now=2.0)
    assert log_there == []
    errors.wait_for_other_hosts(0.0)
    assert store.present(["script error/0", "script error/1"])


def test_a_process_that_reported_nothing_is_a_loss(host):
    errors, log = host(Keys())
    errors.judge(FIRST, 8, is_member=True, beside_a_loss=False, others_are_done=False)
    assert log == []


def test_a_second_error_ends_the_job_and_queries_are_idempotent(host):
    errors, log = host(Keys(), on_error="retry")
    for _ in range(2):
        errors.judge(FIRST, 7, is_member=True, beside_a_loss=False, others_are_done=False)
    assert log == ["slot 1 failed, and is taken for lost: ValueError: wrong (train.py:3 in train)"] * 2
    with pytest.raises(ScriptError, match="which another process had before"):
        errors.judge(SECOND, 7, is_member=False, beside_a_loss=False, others_are_done=False)


def test_processes_that_never_join_do_not_end_a_job_however_many_fail(host):
    errors, _ = host(Keys())
    for member_id in (FIRST, SECOND):
        errors.judge(member_id, 7, is_member=False, beside_a_loss=False, others_are_done=False)
