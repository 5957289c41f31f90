"""What all ranks know of a job's checkpoints, after each section."""

import pytest

from ntp_plugin.megatron.live.save_progress import SaveProgress, SaveResult


def after(*results):
    progress = SaveProgress()
    for result in results:
        progress = progress.ended(result)
    return progress


@pytest.mark.parametrize(
    ("results", "failed_after"),
    [
        ((), 0),
        (({"written": 4},), 0),
        (({"failed": 4},), 4),
        (({"failed": 4}, {}), 4),
        (({"failed": 4}, {"written": 8}), 0),
        (({"written": 4}, {"failed": 8}), 8),
        (({"failed": 4}, {"failed": 8}), 8),
        (({"failed": 4}, {"written": 4}), 0),
        (({"failed": 8}, {"written": 4}), 8),  # an earlier one was still being written
    ],
)
def test_a_failed_checkpoint_counts_until_one_as_new_is_written(results, failed_after):
    assert after(*(SaveResult(**result) for result in results)).failed_after == failed_after


def test_a_void_save_is_taken_again_as_one_of_its_kind_unless_that_fails():
    begun = SaveProgress(failed_after=3).begun(SaveResult(scheduled=6, non_persistent=True), epoch=2)
    assert begun == SaveProgress(scheduled_in=2, non_persistent=True, failed_after=3)
    assert begun.asked(void=False, unfinished=True) == begun
    void = begun.asked(void=True, unfinished=False)
    assert void == SaveProgress(again=True, non_persistent=True, failed_after=3)
    assert void.begun(SaveResult(), epoch=2) == void
    assert not void.begun(SaveResult(scheduled=7), epoch=3).again
    assert void.ended(SaveResult(failed=7)) == SaveProgress(non_persistent=True, failed_after=7)


def test_one_rank_contributes_to_the_vote():
    result = SaveResult(failed=8, non_persistent=True)
    summed = [sum(numbers) for numbers in zip(*(result.numbers(counts=first) for first in (True, False)), strict=True)]
    assert SaveResult.of(summed) == result
