"""Computes the next plan of a live Megatron job from what all ranks report; each rank does so alone.

State moves from rank to rank if the surviving ranks hold all of it, and comes from copies otherwise. Before either, the
ranks decide about a loss: to go on by the plan, or to end for a restart (`planning/decision.py`). This module changes
no state, so a plan can be discarded; its errors say how to change this job's arguments.
"""

import json
from collections.abc import Mapping
from typing import Any

from ntp_plugin.config.sections import TrainingPolicy
from ntp_plugin.errors import BelowMinimum, RestartIsBetter, StateLost
from ntp_plugin.membership.agreement import Agreed
from ntp_plugin.planning.actions import RESTART
from ntp_plugin.planning.decision import as_allowed, decide, in_lines
from ntp_plugin.planning.recovery_plan import Nominal, RecoveryPlan, plan_recovery, within_memory
from ntp_plugin.planning.topology import Slot
from ntp_plugin.recovery.job_copies import JobCopies
from ntp_plugin.resharding.reshard_plan import AvailableVersions, RelayoutPlan, digest_of, plan_relayout
from ntp_plugin.telemetry import Chosen, EventWriter


class NextPlan:
    """The newest plan of a rank."""

    def __init__(
        self, args: Any, policy: TrainingPolicy, nominal: Nominal, *, slot: int, event_writer: EventWriter
    ) -> None:
        self._args, self._policy, self._slot, self._event_writer = args, policy, slot, event_writer
        fits = within_memory(nominal)
        self.too_large_below = fits.policy.min_tp_width if fits.policy.min_tp_width > policy.min_tp_width else 0
        """Replicas of fewer slots would not fit into the memory limit of the job; 0 if all fit."""
        self.nominal = nominal = as_allowed(fits)
        plan_recovery(nominal, lost=frozenset())  # refuse now what cannot work, not when a rank has died
        self.goal: RecoveryPlan
        self.moves: tuple[RelayoutPlan, ...] = ()
        """The moves of each stage; unused if state comes from copies."""
        self.from_copies = False

    def make(self, agreed: Agreed, *, known: frozenset[Slot] | None, copies: JobCopies | None) -> str:
        """Plan who holds, computes and sends what, and return the digest. `known`: slots whose loss was decided about
        before, or None if this rank was not there to decide."""
        try:
            reported = {rank: json.loads(report.held) for rank, report in agreed.reports.items()}
            return self._make(agreed, reported, known, copies)
        except BelowMinimum as found:
            narrower = f", or {self._narrower()}" if self.nominal.topology.narrows else ""
            raise BelowMinimum(found.what, fix=f"{restart(self._args)}{narrower}") from found
        except StateLost as found:
            raise StateLost(found.what, fix=f"{restart(self._args)}; before the next run: {found.fix}") from found

    def _make(
        self,
        agreed: Agreed,
        reported: Mapping[int, tuple[str | None, str | None]],
        known: frozenset[Slot] | None,
        copies: JobCopies | None,
    ) -> str:
        live = {rank: AvailableVersions.decode(held) for rank, (held, _) in reported.items() if held is not None}
        self.from_copies = len(live) < len(reported)
        if not self.from_copies:
            try:
                self.moves = plan_relayout(self.nominal, live, agreed.view.epoch)
            except StateLost:
                if copies is None:
                    raise
                self.from_copies = True
            else:
                self.goal = self.moves[0].goal
                self._decide(known, is_replica_leader=self._slot == min(reported))
                return digest_of(self.moves)
        slot_of, size = self.nominal.topology.slot_of, self.nominal.topology.size
        lost = frozenset(slot_of(rank) for rank in range(size) if rank not in reported)
        self.goal = plan_recovery(self.nominal, lost=lost, lost_before=lost)
        self._decide(known, is_replica_leader=self._slot == min(reported))
        versions = [] if copies is None else copies.choose(copied or "" for _, copied in reported.values())
        if not versions:
            raise StateLost(
                f"{', '.join(map(str, sorted(lost))) or 'no slot'} lost after {agreed.decision.step} sections, and"
                " with them what only they held: there is no version of it of which all parts are copied",
                fix="switch copies on (copies.mode)" if copies is None else self._more_copies(),
            )
        return f"{self.goal.digest} {versions}"

    def _decide(self, known: frozenset[Slot] | None, *, is_replica_leader: bool) -> None:
        """Decide about new losses: to go on by the plan, or to end for a restart. All ranks decide alike; one
        reports."""
        if known is None or set(self.goal.lost) <= known:
            return
        choice = decide(self.goal)
        if is_replica_leader:
            lost = [str(slot) for slot in self.goal.lost]
            self._event_writer.write(Chosen(action=choice.action, lost=lost, table=in_lines(choice)))
        if choice.action == RESTART:
            raise RestartIsBetter(
                f"{len(self.goal.lost)} slots are lost, and a restart is better than going on without them"
                f" ({'; '.join(in_lines(choice))})",
                fix=f"{restart(self._args)}, or leave --ntp-actions-restart-s out",
            )

    def _narrower(self) -> str:
        """Return the option with which narrower replicas could go on."""
        if self.nominal.policy.min_tp_width == self._policy.min_tp_width:
            return "lower --ntp-min-tp-width"
        if self.nominal.policy.min_tp_width == self.too_large_below:
            return "give the job more --ntp-gpu-memory-gb"
        return "leave --ntp-actions-forbid out"

    def _more_copies(self) -> str:
        """Return the option with which more state would have survived."""
        policy = self._policy.copies
        if policy.sharers:
            return f"have fewer slots share a parity than copies.mode = {policy.mode} does, or copies.mode = copy"
        return "set copies.count higher"


def restart(args: Any) -> str:
    """Return from where to restart a job that cannot go on."""
    saved = f"the last checkpoint in {args.save}" if args.save else "the last checkpoint (this job saves none: --save)"
    return f"restart from {saved}"
