"""How `make show-copies` evaluates its clocks."""

import pytest

from benchmarks import copies
from benchmarks.copies import Pair, Step
from benchmarks.copies_alone import bytes_wanted


@pytest.fixture(autouse=True)
def two_processors(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)


def test_a_step_has_the_time_of_its_slowest_rank_and_the_cost_of_all():
    begun = [[0, 7, 10.0, 1.0, 0.5, 0.25], [1, 7, 10.1, 2.0, 1.5, 0.5]]
    over = [[0, 8, 11.0, 1.75, 1.0, 0.25], [1, 8, 11.5, 2.5, 1.75, 0.625]]
    step = Step(seconds=pytest.approx(1.4), busy=1.25, training=0.75, copying=0.125)
    assert copies._steps(begun + over, ranks=2) == {7: step}


def test_a_step_missing_from_one_rank_does_not_count():
    read = [[0, 7, 10.0, 1.0, 0.5, 0.0], [0, 8, 11.0, 1.75, 1.0, 0.0], ["drawn", 1, 0, 3]]
    assert copies._steps(read, ranks=2) == {}


def pair(*, more_seconds, more_busy, more_training=0.0, more_copying=0.0, spared=False):
    off = Step(seconds=2.0, busy=4.0, training=3.0, copying=0.0)
    on = Step(seconds=2.0 + more_seconds, busy=4.0 + more_busy, training=3.0 + more_training, copying=more_copying)
    return Pair(on=on, off=off, spared=spared)


def test_processor_time_explains_its_share_of_a_longer_step():
    assert pair(more_seconds=0.2, more_busy=0.4).explained == pytest.approx(1.1)
    waiting = pair(more_seconds=0.3, more_busy=0.4)
    assert waiting.ratio - waiting.explained == pytest.approx(0.05)


def test_with_a_spare_processor_copies_explain_nothing():
    assert pair(more_seconds=0.2, more_busy=0.4, spared=True).explained == pytest.approx(1.0)
    assert pair(more_seconds=0.2, more_busy=0.4, more_training=0.1, spared=True).explained == pytest.approx(1.05)


def test_bytes_explain_the_time_of_copies_and_of_moving_as_many_bytes():
    alone = [(bytes_wanted() / 0.04, bytes_wanted() / 0.03, 0)] * 2  # seconds of a processor, for all ranks' copies
    bare, known = pair(more_seconds=0.1, more_busy=0.07, more_copying=0.06), copies.Known()

    def explained(mode="copy"):
        found = copies.by_bytes(alone, mode, 0.4, known)
        return found["explained_by_copies_alone"], found["explained_by_bytes"]

    assert explained() == (1.05, 1.05)
    known.others["copy"] = bare.more_of_others
    assert explained() == (1.05, 1.0625)
    assert explained("near") == (1.05, 1.05), "other bytes"
    known.others["copy"] = -0.01
    assert explained() == (1.05, 1.05), "noise takes nothing off"


def test_bytes_are_moved_before_the_rows_they_explain():
    kinds = copies.KINDS
    for kind in kinds:
        bare = [kinds.index(one) for one in kinds if one.bare and one.short and one.mode == kind.mode]
        assert not kind.explained or min(bare) < kinds.index(kind)


def test_a_long_step_is_judged_by_a_short_one_and_by_itself():
    assert copies.is_within(1.03, 0.98, 1.0)
    assert not copies.is_within(1.031, 0.98, 1.0), "short steps say more"
    assert not copies.is_within(1.02, 1.031, 1.0), "long ones are longer beyond doubt"


def test_more_than_the_bound_is_within_where_bytes_explain_it():
    assert copies.is_within(1.05, 1.04, 1.05)
    assert not copies.is_within(1.051, 1.04, 1.05)


@pytest.mark.parametrize(
    ("only", "wanted"),
    [
        ("", copies.COPIES),
        ("spared", [kind for kind in copies.COPIES if kind.spared]),
        ("busy", [kind for kind in copies.COPIES if not kind.spared]),
    ],
)
def test_each_long_kind_has_a_short_one_before_it(only, wanted):
    kinds = copies.ROWS[only]
    short = {kind.alike for kind in kinds if kind.short}
    long = [kind for kind in kinds if not kind.short]
    assert long == [*wanted]
    assert all(kind.alike in short for kind in long)
    assert kinds.index(long[0]) >= len(long)


@pytest.mark.parametrize("kinds", [*copies.ROWS.values(), copies.IN_CI], ids=[*copies.ROWS, "in CI"])
def test_each_kind_of_copy_has_a_claim_and_a_control(kinds):
    assert {kind.mode for kind in kinds if kind.judged and kind.short} == set(copies.PACES)
    assert any(kind.asleep for kind in kinds)


def test_other_rows_than_there_are_end_with_a_line(capsys):
    assert copies.main("", "spare") == 2
    assert capsys.readouterr().err == "ROWS is spare, and has to be spared or busy, or nothing for all\n"
