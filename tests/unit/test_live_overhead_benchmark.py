"""How `make show-live-overhead` evaluates the times of steps."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import evidence, live_overhead
from benchmarks.live_overhead import CASES, jobs_of
from benchmarks.step_pairs import WARM_UP, Block, apart_from_computing, is_first, pairs_of, row_of

PAIRS = 8
STEPS = WARM_UP + 2 * PAIRS
LEFT, ADDED = 0.1, 0.01
"""Of a step without computing; what the plugin adds."""


def test_a_pair_is_two_steps_in_a_row_and_either_begins():
    pairs = pairs_of(range(STEPS))
    assert sorted(step for pair in pairs for step in pair) == [*range(WARM_UP, STEPS)]
    assert all(abs(mine - other) == 1 for mine, other in pairs)
    assert all(is_first(mine) and not is_first(other) for mine, other in pairs)
    first = [mine < other for mine, other in pairs]
    assert first == [not before for before in [not first[0], *first[:-1]]]


@given(st.lists(st.floats(0.5, 2.0), min_size=STEPS, max_size=STEPS))
def test_noise_of_the_computing_is_not_in_the_plugins_share(computing):
    steps = [own + LEFT + ADDED * is_first(number) for number, own in enumerate(computing)]
    whole = statistics.median(without for _, without in pairs_of(steps))
    assert apart_from_computing(pairs_of(steps), pairs_of(computing)) == pytest.approx([1 + ADDED / whole] * PAIRS)


def test_time_added_to_computing_shows_in_full_steps_only():
    computing = [1.0 + ADDED * is_first(number) for number in range(STEPS)]
    steps = [own + LEFT for own in computing]
    assert apart_from_computing(pairs_of(steps), pairs_of(computing)) == pytest.approx([1.0] * PAIRS)
    assert all(mine > other for mine, other in pairs_of(steps))


def test_a_row_has_the_pairs_of_all_its_jobs():
    slow = Block(seconds=[(2.2, 2.0)] * 3, computing=[(1.0, 1.0)] * 3, threads=0.002)
    fast = Block(seconds=[(1.0, 1.0)] * 5, computing=[(0.5, 0.5)] * 5, threads=0.004)
    row = row_of("what", [slow, fast], framework="neither")
    assert (row["jobs"], row["pairs"], row["ratio"], row["step_ms"]) == (2, 8, 1.0, 1000.0)
    assert row["threads"] == pytest.approx(0.003)
    assert row_of("what", [slow], framework="neither")["ratio"] == pytest.approx(1.1)


def test_an_unknown_interval_is_not_reported():
    blind = Block(seconds=[(1.0, 1.0)] * 3, computing=[(0.0, 0.0)] * 3, threads=0.0)
    assert "apart" not in row_of("what", [blind], framework="neither")


def block(*ratios):
    """The block of a job with these pairs."""
    seconds = [(ratio, 1.0) for ratio in ratios] * PAIRS
    return {"seconds": seconds, "computing": [(0.5, 0.5)] * len(seconds), "threads": 0.0}


@pytest.mark.parametrize("scale", ["", "ci"])
def test_jobs_have_the_requested_pairs_and_alternate(scale):
    cases = [*enumerate(CASES)]
    jobs = jobs_of(cases, scale)
    for number, case in cases:
        turns = [turn for of, turn in jobs if of == number]
        assert turns == [*range(len(turns))]
        assert len(turns) * case.pairs_of_a_job(scale) >= case.pairs(scale) > 0
    assert [turn for _, turn in jobs] == sorted(turn for _, turn in jobs)


def test_a_sitting_continues_where_the_last_one_ended(tmp_path, monkeypatch):
    trees, run = ["first"], []

    def job(number):
        if len(run) == 5:
            raise KeyboardInterrupt
        run.append(number)
        return block(0.9, 1.1)

    mine, another = (tmp_path / f"live-overhead-{of}-pairs.jsonl" for of in live_overhead.FRAMEWORKS)
    another.write_text(others := '{"trees": "of another framework"}\n')
    monkeypatch.setattr(live_overhead, "RESULTS", tmp_path)
    monkeypatch.setattr(live_overhead, "_block_of", job)
    monkeypatch.setattr(evidence, "trees", lambda *_: trees[0])
    cases = [*enumerate(CASES)][:2]
    wanted = [number for number, _ in jobs_of(cases, "")]
    with pytest.raises(KeyboardInterrupt):
        live_overhead.found_of(cases, "")
    assert run == wanted[:5]
    del run[:]
    with pytest.raises(KeyboardInterrupt):
        live_overhead.found_of(cases, "")
    assert run == wanted[5:10], "behind what was found"
    trees[0], run[:] = "another", []
    with pytest.raises(KeyboardInterrupt):
        live_overhead.found_of(cases, "")
    assert run == wanted[:5], "of another tree nothing is known"
    assert len(mine.read_text().splitlines()) == 5, "and nothing of the one before is left"
    assert another.read_text() == others, "rows of other frameworks stay"


@pytest.mark.parametrize("middle", [0.9, 1.0, 1.2])
@pytest.mark.parametrize(("apart", "jobs"), [(0.0029, live_overhead.JOBS), (0.0031, 12)])
def test_a_row_ends_when_its_interval_is_narrow(monkeypatch, middle, apart, jobs):
    monkeypatch.setattr(live_overhead, "_block_of", lambda _: block(middle - apart, middle + apart))
    monkeypatch.setattr(evidence, "trees", lambda *_: None)
    found = live_overhead.found_of([(0, CASES[0])], "")
    assert len(found[0]) == jobs


def test_every_framework_has_both_kinds_of_controls():
    for framework in live_overhead.FRAMEWORKS:
        cases = [case for case in live_overhead.CASES if case.framework == framework]
        assert any(not case.live for case in cases)
        assert any(case.planted for case in cases)
