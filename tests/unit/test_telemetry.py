"""Events: written by many processes into one file, read while it grows."""

import dataclasses
import multiprocessing
import resource
import time

import pytest

from ntp_plugin.telemetry import (
    Began,
    Committed,
    Corrupted,
    Ended,
    EventWriter,
    Follower,
    Hung,
    RankLost,
    RecordedEvent,
    Recovered,
    events_file,
    read_run,
)
from ntp_plugin.telemetry.job_state import JobState, SlotState

EVENTS = [
    Began(number=0, pid=1, joiner=False, replicas=2, stages=1, tp=4, micro_batches=[4, 4]),
    Committed(step=1, epoch=0, seconds=0.25, losses={"lm loss": 5.5}, samples=[0, 2]),
    Recovered(epoch=1, seconds=0.1, lost=["r0.s0.t1"], back=[], widths=[[3], [4]], micro_batches=[3, 5]),
    Ended(),
]


def write_steps(path, slot, steps):
    event_writer = EventWriter(path, slot)
    for step in range(steps):
        event_writer.write(Committed(step=step, epoch=0, seconds=0.0, losses={}, samples=list(range(100))))


def test_events_are_read_as_they_were_written(tmp_path):
    event_writer = EventWriter(str(tmp_path / "events"), "r0.s0.t0")
    for event in EVENTS:
        event_writer.write(event)
    recorded = Follower(tmp_path / "events").news()
    assert [one.event for one in recorded] == EVENTS
    assert {one.slot for one in recorded} == {"r0.s0.t0"}
    assert [one.at for one in recorded] == sorted(one.at for one in recorded)


def test_a_follower_reads_each_complete_line_once(tmp_path):
    path = tmp_path / "events"
    follower = Follower(path)
    assert follower.news() == []
    EventWriter(str(path), "r0.s0.t0").write(EVENTS[0])
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])
    assert len(follower.news()) == 1
    assert follower.news() == []
    path.write_bytes(whole + whole)
    assert len(follower.news()) == 1


def test_lines_of_several_processes_do_not_mix(tmp_path):
    path, slots = tmp_path / "events", [f"r{number}.s0.t0" for number in range(4)]
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=write_steps, args=(str(path), slot, 200)) for slot in slots]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    recorded = Follower(path).news()
    for slot in slots:
        assert [one.event.step for one in recorded if one.slot == slot] == list(range(200))


def test_without_a_file_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    event_writer = EventWriter(None, "r0.s0.t0")
    assert not event_writer.is_recording
    event_writer.write(EVENTS[0])
    event_writer.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'"text"',
        b"1e999",
        b"[" * 100_000,
        b'{"at": 1.0, "slot": "a", "event": "Nonsense"}',
        b'{"at": 1.0, "slot": "a", "event": "Ended", "more": 1}',
        b'{"at": "now", "slot": "a", "event": "Ended"}',
        b'{"at": 1.0, "slot": 3, "event": "Ended"}',
        b'{"at": 1.0, "slot": "a", "event": "Began", "pid": 1}',
        b'{"at": 1.0, "slot": "a", "event": "RankLost", "number": true, "pid": 1, "kind": "", "reason": ""}',
        b'{"at": 1.0, "slot": "a", "event": "RankLost", "number": [], "pid": 1, "kind": "", "reason": ""}',
    ],
)
def test_a_line_that_is_no_event_is_counted_and_passed_over(tmp_path, line):
    path = tmp_path / "events"
    path.write_bytes(line + b"\n")
    EventWriter(path, "r0.s0.t0").write(EVENTS[0])
    follower = Follower(path)
    assert [one.event for one in follower.news()] == [EVENTS[0]]
    assert follower.malformed == 1


def test_the_records_of_all_hosts_are_read_together(tmp_path):
    for host in range(3):
        EventWriter(events_file(tmp_path, host), f"host{host}").write(EVENTS[3])
    follower = Follower(tmp_path)
    assert {one.slot for one in follower.news()} == {"host0", "host1", "host2"}
    assert follower.news() == []


def test_a_full_disk_ends_the_record_and_nothing_else(tmp_path, caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    event_writer = EventWriter(tmp_path / "events", "r0.s0.t0")
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        event_writer.write(EVENTS[0])
        event_writer.write(EVENTS[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not event_writer.is_recording
    assert caplog.text.count("no longer recorded") == 1


def heard(*events):
    """A job with these events, one second after the other."""
    job = JobState()
    recorded = [RecordedEvent(at=float(at), slot=slot, event=event) for at, (slot, event) in enumerate(events)]
    return job, [job.receive(one) for one in recorded]


BEGAN = [
    (f"r{replica}.s0.t{slot}", dataclasses.replace(EVENTS[0], tp=2, number=2 * replica + slot))
    for replica in (0, 1)
    for slot in (0, 1)
]


def test_a_job_is_complete_until_a_rank_is_lost_and_again_when_it_rejoins():
    job, _ = heard(*BEGAN)
    assert job.whole
    job.receive(RecordedEvent(at=5.0, slot="host0", event=RankLost(number=3, pid=0, kind="ended", reason="code -9")))
    assert job.slots["r1.s0.t1"] == SlotState.LOST
    lost = Recovered(epoch=1, seconds=0.5, lost=["r1.s0.t1"], back=[], widths=[[2], [1]], micro_batches=[5, 3])
    assert job.receive(RecordedEvent(at=6.0, slot="r0.s0.t0", event=lost))
    assert not job.receive(RecordedEvent(at=6.1, slot="r0.s0.t1", event=lost)), "the others only say the same"
    assert not job.whole
    back = Recovered(epoch=2, seconds=0.5, lost=[], back=["r1.s0.t1"], widths=[[2], [2]], micro_batches=[4, 4])
    job.receive(RecordedEvent(at=7.0, slot="r0.s0.t0", event=back))
    assert job.whole
    assert (job.epoch, job.recoveries) == (2, 2)


def test_goodput_leaves_recoveries_and_steps_taken_again_out():
    steps = [Committed(step=step, epoch=0, seconds=1.0, losses={}, samples=[]) for step in (1, 2, 2, 3)]
    lost = Recovered(epoch=1, seconds=0.25, lost=[], back=[], widths=[[2], [2]], micro_batches=[4, 4])
    job, news = heard(*BEGAN, *(("r0.s0.t0", event) for event in (*steps[:3], lost, steps[3])))
    assert news[4:] == [True, True, False, True, True]
    assert job.useful_s == pytest.approx(2.75)
    assert job.goodput == pytest.approx(2.75 / (job.heard_at - job.began_at))


def test_a_clock_that_is_set_back_does_not_change_the_order_of_a_record(tmp_path, monkeypatch):
    event_writer = EventWriter(tmp_path / "events", "r0.s0.t0")
    event_writer.write(EVENTS[0])
    monkeypatch.setattr(time, "time", lambda: 0.0)
    event_writer.write(EVENTS[1])
    first, second = Follower(tmp_path / "events").news()
    assert 0 <= second.at - first.at < 60


def test_a_reader_of_a_run_learns_of_malformed_lines(tmp_path, caplog):
    EventWriter(events_file(tmp_path), "r0.s0.t0").write(EVENTS[0])
    with events_file(tmp_path).open("a") as file:
        file.write("nonsense\n")
    assert [one.event for one in read_run(tmp_path)] == [EVENTS[0]]
    assert "1 malformed lines skipped" in caplog.text


def test_a_full_file_takes_rare_events_and_no_more_steps(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("ntp_plugin.telemetry.record._MOST_BYTES", 400)
    loss = RankLost(number=1, pid=1, kind="ended", reason="code -9")
    step = Committed(step=1, epoch=0, seconds=0.1, losses={}, samples=list(range(100)))
    event_writer = EventWriter(tmp_path / "events.jsonl", "r0.s0.t0")
    for event in (step, step, loss):
        event_writer.write(event)
    event_writer.close()
    assert [one.event for one in Follower(tmp_path).news()] == [step, loss]
    assert "from now on steps are not recorded" in caplog.text


def test_a_lost_slot_has_no_process_until_one_begins_there():
    state = JobState()
    began = Began(number=1, pid=7, joiner=False, replicas=1, stages=1, tp=2, micro_batches=[1])
    for event in (began, RankLost(number=1, pid=7, kind="ended", reason="code -9")):
        state.receive(RecordedEvent(at=1.0, slot="r0.s0.t1", event=event))
    assert not state.pids
    state.receive(RecordedEvent(at=2.0, slot="r0.s0.t1", event=dataclasses.replace(began, pid=8, joiner=True)))
    assert state.pids == {"r0.s0.t1": 8}


def test_an_event_reported_by_several_is_news_once():
    wrong = Corrupted(step=4, what="weight w", slots=["r0.s0.t0"], certain=True, healed=True)
    _, news = heard(*((slot, wrong) for slot, _ in BEGAN), ("r0.s0.t0", dataclasses.replace(wrong, step=6)))
    assert news == [True, False, False, False, True]
    hung = Hung(waiting=4, seconds=30.0)
    assert heard(("host0", hung), ("host1", hung))[1] == [True, False]
    lost = Recovered(epoch=1, seconds=0.5, lost=[], back=[], widths=[[2], [2]], micro_batches=[4, 4])
    again = heard(*BEGAN, ("host0", hung), ("r0.s0.t0", lost), ("host0", hung))[1]
    assert again[-3:] == [True] * 3, "again after a loss"


@pytest.mark.parametrize("own", [0, 1, 2])
def test_a_loss_reported_by_several_hosts_is_news_once_and_so_is_the_loss_of_the_replacement(own):
    loss = RankLost(number=3, pid=0, kind="hung", reason="it has not moved for 30.0 s while others wait")
    lost = Recovered(epoch=1, seconds=0.5, lost=["r1.s0.t1"], back=[], widths=[[2], [1]], micro_batches=[4, 4])
    began = BEGAN[3][1]
    joiner = dataclasses.replace(began, joiner=True, pid=9)
    first, second = (
        [("host", dataclasses.replace(loss, pid=process.pid if host == own else 0)) for host in range(3)]
        for process in (began, joiner)
    )
    _, news = heard(*BEGAN, ("r0.s0.t0", lost), *first, ("r1.s0.t1", joiner), *second)
    assert news[5:] == [True, False, False, False, True, False, False]


def test_a_process_that_dies_before_it_has_begun_is_news_too():
    loss = [RankLost(number=3, pid=pid, kind="ended", reason="code 1") for pid in (1, 8, 9)]
    assert heard(*BEGAN, *(("host0", one) for one in loss))[1][4:] == [True] * 3
    assert heard(*(("host0", one) for one in loss))[1] == [True] * 3
