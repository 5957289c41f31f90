"""A process that is ordered to harm itself records the order first, and then does what it was ordered to.

Each fault that ends or holds its process runs in a process of its own, without a framework.
"""

import multiprocessing
import os
import resource
import signal
import threading
import time
from typing import ClassVar

import pytest
import torch

from ntp_plugin.chaos import worker
from ntp_plugin.chaos.faults import INJECTED_BY_WORKER, OrderedFault, Orders, Pending
from ntp_plugin.chaos.worker import FaultyWorker, weighed
from ntp_plugin.copies.sketch import sketch
from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.copies.store import NEAR, CopyKey, Store
from ntp_plugin.recovery.fault_points import Weight
from ntp_plugin.telemetry import FaultInjected, Follower, events_file
from tests.patience import PATIENCE_S, until
from tests.unit.copies_bytes import bytes_of, wrong_in
from tests.unit.test_copies_store import put

SLOT = "r0.s0.t1"
BEHIND = "it goes on"
STEP = 5


class RecordingVictim:
    """A victim in this process, and its record."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.orders = folder, Orders.new(folder / "orders.jsonl")
        monkeypatch.setenv("NTP_EVENTS", str(events_file(folder)))
        self.victim, self.weights = FaultyWorker(Pending(self.orders.path)), []
        self.victim.is_here(SLOT, lambda: self.weights)

    def inject(self, what, seconds=0.0, name="1", **more):
        self.orders.give(
            OrderedFault(name=name, what=what, slot=SLOT, during="vote", step=STEP, seconds=seconds, **more)
        )
        self.victim.reached("vote", STEP)

    @property
    def recorded(self):
        return [one.event for one in Follower(events_file(self.folder)).news()]

    def in_a_process(self, what, seconds=0.0):
        """A process that reaches the fault point, and writes a line after it."""

        def run():
            self.inject(what, seconds)
            (self.folder / BEHIND).touch()

        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
        return process

    @property
    def goes_on(self):
        return (self.folder / BEHIND).exists()


@pytest.fixture
def here(tmp_path, monkeypatch):
    return RecordingVictim(tmp_path, monkeypatch)


def recorded_first(what):
    return [FaultInjected(fault="1", what=what, whom=SLOT, fault_point="vote", step=STEP)]


ENDS = {
    "kill": -signal.SIGKILL,
    "segfault": -signal.SIGSEGV,
    "exception": 1,
    "memory": 1,
    "exit": 0,
}
HOLDS = ("stop", "hang", "lock")
STAYS = ("slow", "disk", "clock", "weight", "copy")


def test_every_kind_of_fault_is_tested():
    assert {*ENDS, *HOLDS, *STAYS} == set(INJECTED_BY_WORKER)


@pytest.mark.parametrize(("what", "code"), ENDS.items())
def test_a_process_records_the_order_and_ends(here, capfd, what, code):
    process = here.in_a_process(what)
    process.join(PATIENCE_S)
    assert process.exitcode == code
    assert here.recorded == recorded_first(what)
    assert not here.goes_on
    message = {"exception": "fault 1: an unexpected error", "memory": "MemoryError"}.get(what, "")
    assert message in capfd.readouterr().err


@pytest.mark.parametrize("what", HOLDS)
def test_a_process_records_the_order_and_hangs(here, what):
    process = here.in_a_process(what)
    try:
        until(lambda: here.recorded == recorded_first(what))
        until(lambda: state_of(process.pid) == ("T" if what == "stop" else "S"))
        process.join(0.3)
        assert process.exitcode is None
        assert not here.goes_on
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize(("what", "heartbeats_go_on"), [("hang", True), ("lock", False)])
def test_a_hung_process_sends_heartbeats_unless_it_holds_the_lock(here, what, heartbeats_go_on):
    """A thread of its own writes, as heartbeats are written."""
    heartbeat = here.folder / "heartbeat"

    def run():
        import threading  # noqa: PLC0415

        def beat():
            while True:
                heartbeat.write_text(str(time.monotonic_ns()))
                time.sleep(0.01)

        threading.Thread(target=beat, daemon=True).start()
        until(heartbeat.exists)
        here.inject(what)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    try:
        until(lambda: here.recorded == recorded_first(what))
        until(lambda: state_of(process.pid) == "S")
        until(lambda: heartbeats_within(heartbeat, 0.5) == heartbeats_go_on)
    finally:
        process.kill()
        process.join()


def heartbeats_within(heartbeat, seconds):
    before = heartbeat.read_text()
    time.sleep(seconds)
    return heartbeat.read_text() != before


def state_of(pid):
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
        return file.read().rpartition(") ")[2][0]


def test_a_slow_factor_applies_to_computing_and_not_to_waiting(here, monkeypatch):
    slept = []
    here.inject("slow", 0.0, factor=5.0)
    monkeypatch.setattr(worker.time, "sleep", slept.append)
    threading.Event().wait(0.3)
    here.victim.reached("vote", STEP)
    until_then = time.thread_time() + 0.1
    while time.thread_time() < until_then:
        pass
    here.victim.reached("vote", STEP)
    waited, computed = slept
    assert waited < 4 * 0.3, "it had waited, and computed next to nothing"
    assert computed >= 4 * 0.1


def test_a_slow_rank_is_slow_in_each_later_step_at_one_fault_point(here, monkeypatch):
    slept = []
    here.inject("slow", 0.2)
    monkeypatch.setattr(worker.time, "sleep", slept.append)
    for fault_point, times in [("vote", 1), ("forward", 1), ("vote", 2)]:
        here.victim.reached(fault_point, STEP + 1)
        assert slept == [0.2] * times
    assert here.recorded == recorded_first("slow")


class Later(threading.Timer):
    """A timer that starts when a test lets it."""

    waiting: ClassVar = []

    def start(self):
        self.waiting.append(super().start)


def test_nothing_can_be_written_for_so_long_and_then_it_can(here, monkeypatch):
    monkeypatch.setattr(threading, "Timer", Later)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    path, ignored = here.folder / "checkpoint", signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    path.write_text("what was written")
    try:
        here.inject("disk", 1.0)
        with pytest.raises(OSError, match="File too large"):
            (here.folder / "another").write_text("more")
        assert path.read_text() == "what was written"
        Later.waiting.pop()()
        until(lambda: resource.getrlimit(resource.RLIMIT_FSIZE) == limits)
        (here.folder / "another").write_text("more")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert here.recorded == recorded_first("disk")


@pytest.mark.parametrize("seconds", [-3600.0, 3600.0])
def test_the_clock_jumps_and_the_record_keeps_its_order(here, monkeypatch, seconds):
    real = time.time
    monkeypatch.setattr(time, "time", real)  # which is put back
    here.inject("clock", seconds)
    assert time.time() - real() == pytest.approx(seconds, abs=5)
    here.inject("slow", name="2")
    first, second = Follower(events_file(here.folder)).news()
    assert 0 <= second.at - first.at < 60


def weight(name, values, *, is_cut=False, shared_by=""):
    size = values.numel()
    tensor_slice = TensorSlice(tensor=name, shape=(size,), dim=0, ranges=((0, size),), start=0, stop=size)
    return Weight(tensor_slice=tensor_slice, values=values, is_cut=is_cut, shared_by=shared_by)


def test_final_weights_are_recorded_by_who_holds_the_whole():
    of_an_expert = weight("expert", torch.ones(5), is_cut=True, shared_by="expert group 1")
    found = weighed([weight("norm", torch.ones(2)), weight("qkv", torch.ones(3), is_cut=True), of_an_expert])
    assert (found.alike_values, found.cut_values, found.shared_values) == (2, 3, 5)
    assert found.shared_by == "expert group 1"
    assert found.shared == sketch([(of_an_expert.tensor_slice, of_an_expert.values)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [0.75, -3.0, 0.0])
def test_a_weight_fault_changes_one_number(here, dtype, value):
    before = [torch.full((50,), value, dtype=dtype) for _ in range(3)]
    here.weights = [weight(str(number), values.clone().requires_grad_()) for number, values in enumerate(before)]
    here.inject("weight")
    after = torch.cat([one.values.detach() for one in here.weights])
    changed = after != torch.cat(before)
    assert int(changed.sum()) == 1
    assert float(after[changed]) == (2 * value or 1.0)
    assert here.recorded == recorded_first("weight")


@pytest.mark.parametrize("value", [0.75, -3.0])
def test_a_weight_fault_flips_one_exponent_bit(here, value):
    """Doubling adds one to it: 126 of 0.75 is even; 128 of -3."""
    values = torch.full((50,), value)
    here.weights = [weight("a", values.clone())]
    here.inject("weight")
    bits = values.view(torch.int32) ^ here.weights[0].values.view(torch.int32)
    assert [one for one in bits.tolist() if one] == [1 << 23]


def test_a_copy_fault_changes_only_the_newest_own_copy(here, monkeypatch):
    store = Store(here.folder / "copies" / "host")
    monkeypatch.setenv("NTP_COPIES", str(here.folder / "copies"))
    monkeypatch.setenv("RANK", "3")
    older, newest = (CopyKey(kind=NEAR, slot=3, epoch=2, number=number) for number in (1, 0))
    other = CopyKey(kind=NEAR, slot=4, epoch=2, number=0)
    for seconds, place in enumerate((older, newest, other)):
        put(store, place)
        os.utime(store.folder / f"{place}.json", (seconds, seconds))
    before = {place: bytes_of(store, place) for place in (older, newest, other)}
    here.inject("copy")
    changed = {place: int((bytes_of(store, place) != before[place]).sum()) for place in before}
    assert changed == {older: 0, newest: -(-len(before[newest]) // 256), other: 0}
    assert wrong_in(store, newest)[0] == "a (weight)"
    assert wrong_in(store, older) == wrong_in(store, other) == []
    assert here.recorded == recorded_first("copy")
    store.close()


def test_a_process_without_copies_or_in_another_slot_takes_no_fault(here, monkeypatch):
    monkeypatch.delenv("NTP_COPIES", raising=False)
    here.inject("copy")
    here.orders.give(OrderedFault(name="2", what="kill", slot="r9.s0.t0", during="vote", step=STEP))
    here.victim.reached("vote", STEP)
    assert here.recorded == recorded_first("copy")
