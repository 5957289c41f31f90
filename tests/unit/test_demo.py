"""What the demo says of two runs: it must be able to say no."""

import dataclasses
from pathlib import Path

import pytest

from ntp_plugin.telemetry import Began, Committed, Recovered, Told

RECIPES = Path(__file__).parents[2] / "recipes/megatron"
STEPS, BATCH, VICTIM = 6, 4, "r0.s0.t1"


@pytest.fixture
def demo(monkeypatch):
    """The two modules that the demo is made of besides itself."""
    monkeypatch.syspath_prepend(RECIPES)
    import demo_report  # noqa: PLC0415
    import demo_view  # noqa: PLC0415

    return demo_view, demo_report


def picture(demo, *, killed_in=None, back_in=None):
    """Of a run in which a step takes a second, and a recovery half of one."""
    view, _ = demo
    seen = view.Picture(steps=STEPS, replicas=2, tp=2)
    slots, epoch = list(seen.slots), 0
    for slot in slots:
        began = Began(pid=1, newcomer=False, replicas=2, stages=1, tp=2, micro_batches=[2, 2])
        seen.hear(Told(at=0.0, slot=slot, event=began))

    def recovered(at, **change):
        for slot in slots:
            seen.hear(Told(at=at, slot=slot, event=Recovered(epoch=epoch, seconds=0.5, **change)))

    for step in range(1, STEPS + 1):
        if step == killed_in:
            epoch += 1
            seen.killed(VICTIM)
            slots.remove(VICTIM)
            recovered(step - 0.5, lost=[VICTIM], back=[], widths=[[1], [2]], micro_batches=[1, 3])
        if step == back_in:
            epoch += 1
            slots.append(VICTIM)
            recovered(step - 0.5, lost=[], back=[VICTIM], widths=[[2], [2]], micro_batches=[2, 2])
        for slot in slots:
            samples = list(range((step - 1) * BATCH, step * BATCH)) if slot == "r0.s0.t0" else []
            event = Committed(step=step, epoch=epoch, seconds=1.0, losses={"lm loss": 5.0 / step}, samples=samples)
            seen.hear(Told(at=float(step), slot=slot, event=event))
    return seen


def report(demo, *, back_in=5):
    _, reports = demo
    return reports.Report(
        disturbed=picture(demo, killed_in=3, back_in=back_in),
        undisturbed=picture(demo),
        kills=[reports.Kill(slot=VICTIM, pid=1, step=3, at=2.25)],
    )


def test_two_runs_that_are_the_same_training(demo):
    told = report(demo)
    assert told.holds
    assert told.recovery_s(told.kills[0]) == 0.75
    assert told.disturbed.widths == [2, 2]
    assert told.returns() == [(VICTIM, 5)]
    assert told.layout_of(2) == ([2, 2], [2, 2])
    assert told.layout_of(3) == ([1, 2], [1, 3])


def test_a_step_that_some_took_with_the_lost_one_is_not_the_next(demo):
    told = report(demo)
    told.disturbed.commits[3]["r1.s0.t0"] = (2.5, 0)
    assert told.recovery_s(told.kills[0]) == 1.75


@pytest.mark.parametrize("spoil", ["loss", "last step", "sample twice", "sample missing", "recovery", "return"])
def test_what_is_wrong_is_noticed(demo, spoil):
    told = report(demo, back_in=None if spoil == "return" else 5)
    seen = told.disturbed
    if spoil == "loss":
        seen.losses[STEPS] *= 1 + 1e-8
    elif spoil == "last step":
        del seen.losses[STEPS]
    elif spoil == "sample twice":
        seen.samples[4].append(13)
    elif spoil == "sample missing":
        seen.samples[4].pop()
    elif spoil == "recovery":
        told = dataclasses.replace(told, kills=[dataclasses.replace(told.kills[0], slot="r1.s0.t1")])
    assert not told.holds


def test_the_page_tells_all_and_needs_nothing_else(demo, tmp_path, capsys):
    report(demo).write(tmp_path, command="make demo")
    page = (tmp_path / "demo.html").read_text()
    assert VICTIM in page
    assert "0.75 s" in page
    assert "<script" not in page
    assert "src=" not in page
    assert str(tmp_path) in capsys.readouterr().out


def test_without_a_terminal_there_are_lines(demo, capsys):
    view, _ = demo
    with view.Screen("a title") as screen:
        screen.show(picture(demo, killed_in=3))
    told = capsys.readouterr().out
    assert "a title" in told
    assert f"{VICTIM} is killed by SIGKILL" in told
    assert f"step   {STEPS} of {STEPS}" in told
