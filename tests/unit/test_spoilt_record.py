"""A record that another process has written to: readers do not stop, and what they report of the job is right."""

import contextlib
import dataclasses
import json
import random

import pytest

from ntp_plugin.cli.main import main
from ntp_plugin.cli.screen import Screen
from ntp_plugin.telemetry import (
    Began,
    Committed,
    Copied,
    Ended,
    EventWriter,
    Follower,
    RankLost,
    RecordedEvent,
    Recovered,
    events_file,
)
from ntp_plugin.telemetry.events import Compared, FaultInjected
from ntp_plugin.telemetry.job_state import JobState, SlotState
from tests.unit.test_chaos_faults import malformed

SLOTS = ["r0.s0.t0", "r0.s0.t1", "r1.s0.t0", "r1.s0.t1"]
LINES = 10_000
BEGAN = Began(number=0, pid=1, joiner=False, replicas=2, stages=1, tp=2, micro_batches=[4, 4])
LOST = Recovered(epoch=1, seconds=0.1, lost=["r1.s0.t1"], back=[], widths=[[2], [1]], micro_batches=[5, 3])
BACK = Recovered(epoch=2, seconds=0.1, lost=[], back=["r1.s0.t1"], widths=[[2], [2]], micro_batches=[4, 4])


def step(number, loss=5.5):
    return Committed(step=number, epoch=0, seconds=0.25, losses={"lm loss": loss}, samples=[0, 2])


STORY = [
    *((slot, dataclasses.replace(BEGAN, number=number, pid=100 + number)) for number, slot in enumerate(SLOTS)),
    ("r0.s0.t0", step(1)),
    ("r0.s0.t0", Copied(step=1, size=1000, taken_s=0.1, seconds=0.2, far=1)),
    ("r1.s0.t1", FaultInjected(fault="1", what="kill", whom="r1.s0.t1", fault_point="vote", step=2)),
    ("host0", RankLost(number=3, pid=103, kind="ended", reason="code -9")),
    ("r0.s0.t0", LOST),
    ("r0.s0.t0", step(2, -1.5)),
    ("r0.s0.t0", Compared(step=2, values=7, odd=0)),
    ("r1.s0.t1", dataclasses.replace(BEGAN, number=3, pid=104, joiner=True)),
    ("r0.s0.t0", BACK),
    ("r0.s0.t0", step(3, float("nan"))),
    ("r0.s0.t0", Ended()),
]


def known(job):
    """The state as text, in which NaN equals NaN. A machine may have any name."""
    return json.dumps({**dataclasses.asdict(job), "machines": {}}, default=sorted)


def test_ten_thousand_malformed_lines_leave_status_unchanged(tmp_path, capsys):
    """After each event come malformed lines, and changed copies of the same event."""
    path, dice = events_file(tmp_path), random.Random(1)
    job, right, follower, all_recorded = JobState(), JobState(), Follower(tmp_path), []
    with Screen("a job") as screen:
        for slot, event in STORY:
            EventWriter(path, slot).write(event)
            whole = path.read_bytes().splitlines()[-1]
            with path.open("ab") as file:
                file.writelines(malformed(whole, dice) + b"\n" for _ in range(LINES // len(STORY) + 1))
            news = follower.news()
            for one in news:
                job.receive(one)
            screen.show(job, news)
            right.receive(news[0])
            all_recorded.append(news[0])
            assert known(job) == known(right), event
    assert follower.malformed > 0.8 * LINES
    assert [news.event for news in all_recorded[:-2]] == [event for _, event in STORY[:-2]], (
        "the last but one has a NaN, which equals nothing"
    )
    assert job.whole
    capsys.readouterr()
    assert main(["status", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {name: shown[name] for name in ("step", "epoch", "recoveries", "ended", "whole", "goodput")} == {
        "step": 3,
        "epoch": 2,
        "recoveries": 2,
        "ended": True,
        "whole": True,
        "goodput": job.goodput,
    }
    assert shown["slots"] == dict.fromkeys(SLOTS[:3], "alive") | {SLOTS[3]: "back"}


@pytest.mark.parametrize(
    "spoilt_event",
    [
        dataclasses.replace(BEGAN, tp=1 << 40),
        dataclasses.replace(BEGAN, replicas=0),
        dataclasses.replace(BEGAN, micro_batches=[]),
        dataclasses.replace(BEGAN, tp=1),  # whose slot is none of its own layout
    ],
)
def test_an_impossible_layout_is_ignored(spoilt_event):
    job = JobState()
    assert not job.receive(RecordedEvent(at=1.0, slot="r1.s0.t1", event=spoilt_event))
    assert job.slots == {}
    job.receive(RecordedEvent(at=2.0, slot="r1.s0.t1", event=BEGAN))
    assert list(job.slots) == SLOTS
    assert job.began_at == 2.0


@pytest.mark.parametrize(
    ("slot", "spoilt_event"),
    [
        ("r0.s0.t7", BEGAN),
        ("r0.s0.t1", dataclasses.replace(BEGAN, tp=4)),
        ("r0.s0.t7", Copied(step=0, size=1, taken_s=0.1, seconds=0.2, far=1)),
        ("r0.s0.t0", dataclasses.replace(LOST, widths=[[2]])),
        ("r0.s0.t0", dataclasses.replace(LOST, widths=[[2], []])),
        ("r0.s0.t0", dataclasses.replace(LOST, micro_batches=[5])),
    ],
)
def test_events_that_do_not_fit_the_layout_are_skipped(slot, spoilt_event, capsys):
    job = JobState()
    job.receive(RecordedEvent(at=1.0, slot="r0.s0.t0", event=BEGAN))
    before = known(job)
    assert not job.receive(RecordedEvent(at=1.0, slot=slot, event=spoilt_event))
    assert known(job) == before


def test_malformed_slots_are_neither_lost_nor_rejoined():
    job = JobState()
    job.receive(RecordedEvent(at=1.0, slot="r0.s0.t0", event=BEGAN))
    job.receive(
        RecordedEvent(
            at=2.0, slot="r0.s0.t0", event=dataclasses.replace(LOST, lost=["r1.s0.t1", "r9.s9.t9"], back=["x"])
        )
    )
    assert list(job.slots) == SLOTS
    assert job.slots["r1.s0.t1"] == SlotState.LOST


@pytest.mark.parametrize("number", ["-1", "1e400", "NaN", "1" + "0" * 400, "1e19", "true", "null", '"1"'])
@pytest.mark.parametrize("field", ["at", "step", "seconds"])
def test_an_invalid_number_is_no_event(tmp_path, field, number):
    path = events_file(tmp_path)
    EventWriter(path, "r0.s0.t0").write(step(1))
    text = path.read_text()
    value = json.dumps(json.loads(text)[field])
    path.write_text(text.replace(f'"{field}": {value}', f'"{field}": {number}'))
    follower = Follower(tmp_path)
    assert follower.news() == []
    assert follower.malformed == 1


def test_a_report_skips_an_impossible_fault_and_says_so(tmp_path, capsys):
    """Earlier it refused the complete record."""
    for slot, event in STORY:
        with contextlib.closing(EventWriter(events_file(tmp_path), slot)) as event_writer:
            event_writer.write(event)
    assert main(["report", str(tmp_path)]) in (0, 1)
    before = capsys.readouterr().out
    for name in ("", "two words", "x" * 81):
        with contextlib.closing(EventWriter(events_file(tmp_path), "r1.s0.t0")) as event_writer:
            event_writer.write(FaultInjected(fault=name, what="kill", whom="r1.s0.t1", fault_point="", step=2))
    assert main(["report", str(tmp_path)]) in (0, 1)
    output = capsys.readouterr().out
    assert output.startswith(before), "the rest is judged as before"
    assert "left out: a FaultInjected line of r1.s0.t0: 'two words' is no name for a fault" in output
    assert output.count("left out: ") == 3
    assert json.loads((tmp_path / "verdict.json").read_text())["left_out"]
    assert "Left out: a FaultInjected line" in (tmp_path / "report.html").read_text()
