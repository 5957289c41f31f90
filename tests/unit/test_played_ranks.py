"""A rank rejoins a test at the step that the test names, however fast or slow the others are."""

import threading
import time
from types import SimpleNamespace

import pytest

from tests.harness.played_ranks import Asking, asking_of, report_request, wait_until_they_ask
from tests.patience import PATIENCE_S

STEP = 14


class Asks(threading.Thread):
    """A joining rank, on a store that only notes its keys."""

    def __init__(self, folder, asking):
        super().__init__(daemon=True)
        self.keys = []
        self._store = SimpleNamespace(create=lambda key, _: self.keys.append(key))
        rank = SimpleNamespace(folder=folder, member_id=SimpleNamespace(incarnation="2/1"))
        report_request(rank, asking, self._store)
        self.start()

    def run(self):
        for key in ("beat/2", "come/1/2", "asked/1/0"):
            self._store.create(key, "")


def member_at(folder, step, asking, patience_s=PATIENCE_S):
    until = time.monotonic() + patience_s

    def check():
        if time.monotonic() > until:
            raise TimeoutError

    wait_until_they_ask(SimpleNamespace(folder=folder), asking, lambda: step, check)


def test_an_early_joiner_asks_when_it_is_awaited(tmp_path):
    asking = asking_of({2: STEP})
    joiner = Asks(tmp_path, asking)
    member_at(tmp_path, STEP - 1, asking)
    joiner.join(0.1)
    assert joiner.keys == ["beat/2"]
    member_at(tmp_path, STEP, asking)
    joiner.join(PATIENCE_S)
    assert joiner.keys == ["beat/2", "come/1/2", "asked/1/0"]


def test_a_late_joiner_is_waited_for(tmp_path):
    asking = asking_of({2: STEP})
    with pytest.raises(TimeoutError):
        member_at(tmp_path, STEP, asking, patience_s=0.0)
    Asks(tmp_path, asking).join(PATIENCE_S)
    member_at(tmp_path, STEP, asking)


@pytest.mark.parametrize("asking", [Asking(awaited={"2/1": STEP}, sooner=True), Asking(), asking_of({3: STEP})])
def test_a_joiner_without_a_schedule_asks_at_once(tmp_path, asking):
    joiner = Asks(tmp_path, asking)
    joiner.join(PATIENCE_S)
    assert joiner.keys[-1] == "asked/1/0"
