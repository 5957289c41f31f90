"""Events: told by many processes into one file, read while it grows."""

import multiprocessing

from ntp_plugin.telemetry import Began, Committed, Ended, Follower, Recovered, Teller

EVENTS = [
    Began(pid=1, newcomer=False, replicas=2, stages=1, tp=4, micro_batches=[4, 4]),
    Committed(step=1, epoch=0, seconds=0.25, losses={"lm loss": 5.5}, samples=[0, 2]),
    Recovered(epoch=1, seconds=0.1, lost=["r0.s0.t1"], back=[], widths=[[3], [4]], micro_batches=[3, 5]),
    Ended(),
]


def tell_steps(path, slot, steps):
    teller = Teller(path, slot)
    for step in range(steps):
        teller.tell(Committed(step=step, epoch=0, seconds=0.0, losses={}, samples=list(range(100))))


def test_what_is_told_is_what_is_read(tmp_path):
    teller = Teller(str(tmp_path / "events"), "r0.s0.t0")
    for event in EVENTS:
        teller.tell(event)
    told = Follower(tmp_path / "events").news()
    assert [one.event for one in told] == EVENTS
    assert {one.slot for one in told} == {"r0.s0.t0"}
    assert [one.at for one in told] == sorted(one.at for one in told)


def test_a_follower_reads_each_line_once_and_only_when_it_is_whole(tmp_path):
    path = tmp_path / "events"
    follower = Follower(path)
    assert follower.news() == []
    Teller(str(path), "r0.s0.t0").tell(EVENTS[0])
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])
    assert len(follower.news()) == 1
    assert follower.news() == []
    path.write_bytes(whole + whole)
    assert len(follower.news()) == 1


def test_lines_of_several_processes_do_not_mix(tmp_path):
    path, slots = tmp_path / "events", [f"r{number}.s0.t0" for number in range(4)]
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=tell_steps, args=(str(path), slot, 200)) for slot in slots]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    told = Follower(path).news()
    for slot in slots:
        assert [one.event.step for one in told if one.slot == slot] == list(range(200))


def test_without_a_file_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    teller = Teller(None, "r0.s0.t0")
    assert not teller.is_heard
    teller.tell(EVENTS[0])
    teller.close()
    assert list(tmp_path.iterdir()) == []
