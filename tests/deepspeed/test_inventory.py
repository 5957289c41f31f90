"""How a DeepSpeed job handles the state that it restores from copies."""

from ntp_plugin.copies.inventory import require_known
from ntp_plugin.deepspeed.inventory import known

FOUND = ["weight a", "main weights", "counted scheduler", "the weight b, which nobody steps,", "the buffer c"]


def test_unstepped_state_is_passed_on_except_with_copies_alone():
    assert require_known(FOUND, known(resumes=False), strict=True) == []
    assert require_known(FOUND, known(resumes=True), strict=False) == FOUND[3:]


def test_error_feedback_is_unknown_state():
    kept = ["what the optimizer keeps as exp_avg", "what the optimizer keeps as worker_error"]
    assert require_known(kept, known(resumes=False), strict=False) == kept[1:]
