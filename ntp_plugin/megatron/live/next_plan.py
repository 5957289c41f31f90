"""What the ranks of a live Megatron job do next, made by each of them alone of what everybody has reported.

State moves from rank to rank where the living hold all of it, and comes from copies where they do not. Before either,
a loss is decided about: to go on by the plan, or to end for a restart (`planning/decision.py`). Nothing is changed
here, so that a plan can be thrown away; errors say what this job's arguments would have to be.
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
from ntp_plugin.telemetry import Chosen, Teller


class NextPlan:
    """The newest one of a rank."""

    def __init__(self, args: Any, policy: TrainingPolicy, nominal: Nominal, *, slot: int, teller: Teller) -> None:
        self._args, self._policy, self._slot, self._teller = args, policy, slot, teller
        fits = within_memory(nominal)
        self.too_large_below = fits.policy.min_tp_width if fits.policy.min_tp_width > policy.min_tp_width else 0
        """Fewer slots than this would not fit into the memory that the job was given; 0 where all would."""
        self.nominal = nominal = as_allowed(fits)
        plan_recovery(nominal, lost=frozenset())  # what cannot work is refused now, and not when a rank has died
        self.goal: RecoveryPlan
        self.moves: tuple[RelayoutPlan, ...] = ()
        """Stage by stage; of no meaning where state comes from copies."""
        self.from_copies = False

    def make(self, agreed: Agreed, *, known: frozenset[Slot] | None, copies: JobCopies | None) -> str:
        """Who holds what, computes what and sends what; its digest. `known`: whose loss was decided about before, or
        None where this rank was not there to decide."""
        try:
            told = {rank: json.loads(report.held) for rank, report in agreed.reports.items()}
            return self._make(agreed, told, known, copies)
        except BelowMinimum as found:
            raise BelowMinimum(found.what, way_out=f"{restart(self._args)}, or {self._narrower()}") from found
        except StateLost as found:
            raise StateLost(
                found.what, way_out=f"{restart(self._args)}; before the next run: {found.way_out}"
            ) from found

    def _make(
        self,
        agreed: Agreed,
        told: Mapping[int, tuple[str | None, str | None]],
        known: frozenset[Slot] | None,
        copies: JobCopies | None,
    ) -> str:
        live = {rank: AvailableVersions.decode(held) for rank, (held, _) in told.items() if held is not None}
        self.from_copies = len(live) < len(told)
        if not self.from_copies:
            try:
                self.moves = plan_relayout(self.nominal, live, agreed.view.epoch)
            except StateLost:
                if copies is None:
                    raise
                self.from_copies = True
            else:
                self.goal = self.moves[0].goal
                self._decide(known, is_replica_leader=self._slot == min(told))
                return digest_of(self.moves)
        slot_of, size = self.nominal.topology.slot_of, self.nominal.topology.size
        lost = frozenset(slot_of(rank) for rank in range(size) if rank not in told)
        self.goal = plan_recovery(self.nominal, lost=lost, lost_before=lost)
        self._decide(known, is_replica_leader=self._slot == min(told))
        versions = [] if copies is None else copies.choose(copied or "" for _, copied in told.values())
        if not versions:
            raise StateLost(
                f"{', '.join(map(str, sorted(lost))) or 'no slot'} lost after {agreed.decision.step} sections, and"
                " with them what only they held: there is no version of it of which all parts are copied",
                way_out="switch copies on (copies.mode)" if copies is None else self._more_copies(),
            )
        return f"{self.goal.digest} {versions}"

    def _decide(self, known: frozenset[Slot] | None, *, is_replica_leader: bool) -> None:
        """About losses that are new: to go on by the plan, or to end for a restart. All decide alike; one tells."""
        if known is None or set(self.goal.lost) <= known:
            return
        choice = decide(self.goal)
        if is_replica_leader:
            lost = [str(slot) for slot in self.goal.lost]
            self._teller.tell(Chosen(action=choice.action, lost=lost, table=in_lines(choice)))
        if choice.action == RESTART:
            raise RestartIsBetter(
                f"{len(self.goal.lost)} slots are lost, and a restart is better than to go on without them"
                f" ({'; '.join(in_lines(choice))})",
                way_out=f"{restart(self._args)}, or leave --ntp-actions-restart-s out",
            )

    def _narrower(self) -> str:
        """What would have let replicas go on that were too narrow."""
        if self.nominal.policy.min_tp_width == self._policy.min_tp_width:
            return "lower --ntp-min-tp-width"
        if self.nominal.policy.min_tp_width == self.too_large_below:
            return "give the job more --ntp-gpu-memory-gb"
        return "leave --ntp-actions-forbid out"

    def _more_copies(self) -> str:
        """What would have survived more."""
        policy = self._policy.copies
        if policy.sharers:
            return f"have fewer slots share a parity than copies.mode = {policy.mode} does, or copies.mode = copy"
        return "set copies.count higher"


def restart(args: Any) -> str:
    """Where a job that cannot go on is to be started from."""
    saved = f"the last checkpoint in {args.save}" if args.save else "the last checkpoint (this job saves none: --save)"
    return f"restart from {saved}"
