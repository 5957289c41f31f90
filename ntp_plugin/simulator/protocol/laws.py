"""The laws that the protocol must keep: safety while faults happen, and liveness after them."""

from collections.abc import Iterable, Mapping

from ntp_plugin.membership.protocol import Decision, Report, View


class Violation(AssertionError):
    """The protocol broke a law."""


def lineage(step: int) -> int:
    """The state of training after so many steps, in a run to which nothing happened."""
    state = 17
    for number in range(1, step + 1):
        state = after(state, number)
    return state


def after(state: int, step: int) -> int:
    """The state that a step makes of another one. Any wrong state stays wrong."""
    return (state * 1_000_003 + step) % 2_147_483_647


def vote_on(step: int) -> int:
    """How the vote on a step goes."""
    return step % 2


def require_one_mind(view: View, digests: Iterable[str | None]) -> None:
    """All members of an epoch made the same plan."""
    distinct = set(digests)
    if len(distinct) != 1 or None in distinct:
        raise Violation(f"the members of epoch {view.epoch} made different plans: {sorted(map(str, distinct))}")


def require_standable(view: View, reports: Mapping[int, Report], decision: Decision) -> None:
    """No survivor's step is undone, everybody can reach the step, and the vote on it is told rightly."""
    veterans = {slot: report for slot, report in reports.items() if not report.joiner}
    newest = max(report.applied for report in veterans.values())
    if decision.step < newest:
        raise Violation(f"step {newest} was applied, and epoch {view.epoch} goes back to {decision.step}")
    for slot, report in veterans.items():
        if not report.oldest <= decision.step <= report.applied + report.prepared:
            raise Violation(f"slot {slot} cannot resume from step {decision.step}: {report}")
    if decision.vote != vote_on(decision.step):
        raise Violation(f"the vote on step {decision.step} is told wrongly")


def require_true_state(slot: int, state: int | None, step: int) -> None:
    """What a rank trains with is what a run without faults has after as many steps."""
    if state != lineage(step):
        raise Violation(f"slot {slot} has a wrong state at step {step}")
