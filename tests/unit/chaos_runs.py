"""A run and its reference run, as their records would have them."""

import dataclasses

from ntp_plugin.chaos.history import History
from ntp_plugin.telemetry import Began, Committed, Ended, FaultInjected, RankLost, RecordedEvent, Recovered, Weighed

STEPS, BATCH, VICTIM = 6, 4, "r0.s0.t1"
PHASES = {"agree": 0.1, "regroup": 0.1, "move": 0.2}


def weighed(slots, slot):
    """Weights of a replica with eight values cut into parts, one after the other, and three replicated ones."""
    sharing = [other for other in slots if other.startswith(slot.split(".")[0])]
    mine = [value for value in range(8) if sharing[value % len(sharing)] == slot]
    cut = [float(value) if value in mine else 0.0 for value in range(8)]
    return Weighed(cut=cut, cut_values=len(mine), alike=[1.0, 2.0, 3.0], alike_values=3)


def weighed_with_experts(slots, slot):
    """The same, and twelve values of experts dealt to all slots, which are one expert group."""
    mine = [value for value in range(12) if slots[value % len(slots)] == slot]
    experts = [float(value) if value in mine else 0.0 for value in range(12)]
    return dataclasses.replace(
        weighed(slots, slot), shared=experts, shared_values=len(mine), shared_by="expert group 0"
    )


def run_events(*, killed_in=None, back_in=None, samples=None, loss=5.0, steps=STEPS, again=(), weights=weighed):
    """A run in which a step takes a second, and a recovery 0.4 s, after 0.1 s without detection."""
    slots, epoch, found = [f"r{replica}.s0.t{slot}" for replica in range(2) for slot in range(2)], 0, []

    def tell(at, slot, event):
        found.append(RecordedEvent(at=at, slot=slot, event=event))

    def recover(at, **change):
        for slot in slots:
            tell(at, slot, Recovered(epoch=epoch, seconds=0.4, phases=PHASES, **change))

    for number, slot in enumerate(slots):
        tell(
            0.0,
            slot,
            Began(pid=100 + number, number=number, joiner=False, replicas=2, stages=1, tp=2, micro_batches=[2, 2]),
        )
    for step in range(1, steps + 1):
        if step == killed_in:
            epoch += 1
            slots.remove(VICTIM)
            tell(
                step - 0.9,
                VICTIM,
                FaultInjected(fault="1", what="kill", whom=VICTIM, fault_point="backward", step=step),
            )
            tell(
                step - 0.8, "host0", RankLost(number=1, pid=101, kind="ended", reason="its process ended with code -9")
            )
            recover(step - 0.4, lost=[VICTIM], back=[], widths=[[1], [2]], micro_batches=[1, 3])
        if step == back_in:
            epoch += 1
            slots.append(VICTIM)
            recover(step - 0.5, lost=[], back=[VICTIM], widths=[[2], [2]], micro_batches=[2, 2])
        for slot in slots:
            own = list(range((step - 1) * BATCH, step * BATCH)) if slot == "r0.s0.t0" else []
            own = samples(step, own) if samples and own else own
            event = Committed(step=step, epoch=epoch, seconds=0.9, losses={"lm loss": loss / step}, samples=own)
            tell(float(step), slot, event)
            if step in again:
                tell(step + 0.5, slot, event)
    for slot in slots:
        if weights and (last := weights(slots, slot)):
            tell(steps + 0.9, slot, last)
        tell(steps + 1.0, slot, Ended())
    return found


def history(**changes):
    return History.of(run_events(**changes))
