"""The live protocol functions, and planted bugs.

A planted bug stands in for one function. The search must find each of them, or it would find nothing else either.
"""

import dataclasses
from collections.abc import Callable, Mapping

from ntp_plugin.errors import ConfigError
from ntp_plugin.membership import failure_detector, protocol
from ntp_plugin.membership.failure_detector import Pulse, RankFailure, Thresholds
from ntp_plugin.membership.gathering import Read, Write
from ntp_plugin.membership.protocol import Decision, Member, Phase, Report, Step

type Finished = tuple[bool | None, Write | None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What members and supervisors call."""

    advance: Callable[..., Step] = protocol.advance
    finish: Callable[[Member, Read, int], Finished] = protocol.finish
    decide: Callable[[Mapping[int, Report]], Decision] = protocol.decide
    find_lost: Callable[..., list[RankFailure]] = failure_detector.find_lost
    judge: Callable[..., list[RankFailure]] = failure_detector.judge


LIVE = Rules()


def _decide_early(member: Member, read: Read, *, report: Report, digest: str | None, fan: int) -> Step:
    """A member plans before all have reported."""
    following, write = protocol.advance(member, read, report=report, digest=digest, fan=fan)
    if member.phase is Phase.GATHERING and following == member:
        return dataclasses.replace(member, phase=Phase.PLANNING), None
    return following, write


def _max_for_min(reports: Mapping[int, Report]) -> Decision:
    """All ranks resume from the newest step that any of them has applied or holds gradients for."""
    step = max(report.applied + report.prepared for report in reports.values())
    return Decision(step=step, vote=step % 2, roll_forward=(), roll_back=())


def _one_version_only(reports: Mapping[int, Report]) -> Decision:
    """Reduced gradients are thrown away when a member leaves, so that nobody can roll forward."""
    return protocol.decide({slot: dataclasses.replace(report, prepared=False) for slot, report in reports.items()})


def _stale_epoch(member: Member, read: Read, *, report: Report, digest: str | None, fan: int) -> Step:
    """Whoever has gathered the reports no longer looks for a newer view."""

    def old(key: str) -> str | None:
        return None if key.startswith("view/") else read(key)

    late = member.phase in (Phase.PLANNING, Phase.ENTERING)
    return protocol.advance(member, old if late else read, report=report, digest=digest, fan=fan)


def _unhealed_donor(reports: Mapping[int, Report]) -> Decision:
    """Who has come back and holds nothing yet counts as one who holds state."""
    return protocol.decide({slot: dataclasses.replace(report, joiner=False) for slot, report in reports.items()})


def _nobody_hangs(*_facts: object) -> list[RankFailure]:
    """Whoever holds all others up is never named."""
    return []


def _impatient(pulses: Mapping[int, Pulse], thresholds: Thresholds, *, now: float) -> list[RankFailure]:
    """A rank that has waited for others for long is taken for silent."""
    found = failure_detector.find_lost(pulses, thresholds, now=now)
    waited = [slot for slot, p in pulses.items() if p.moved_at is not None and now - p.moved_at > thresholds.frozen_s]
    return found + [RankFailure(slot=slot, kind="silent", reason="it has not moved") for slot in waited]


PLANTED: Mapping[str, Rules] = {
    "decide-early": Rules(advance=_decide_early),
    "max-for-min": Rules(decide=_max_for_min),
    "one-version-only": Rules(decide=_one_version_only),
    "stale-epoch": Rules(advance=_stale_epoch),
    "unhealed-donor": Rules(decide=_unhealed_donor),
    "nobody-hangs": Rules(judge=_nobody_hangs),
    "impatient": Rules(find_lost=_impatient),
}


def rules_of(planted: str | None) -> Rules:
    """The live rules, or those with one planted bug."""
    if planted is None:
        return LIVE
    if planted not in PLANTED:
        raise ConfigError(f"{planted!r} is no planted bug", fix=f"choose from {', '.join(PLANTED)}")
    return PLANTED[planted]
