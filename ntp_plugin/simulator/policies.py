"""The policies that a simulation compares: how each reacts to a loss.

A policy, and what is done about a domain that has lost GPUs:

    dp-drop     the degraded replica does not go on
    group-drop  all replicas that share experts or sequences with it do not go on either, as where nobody deals experts
    ntp         it goes on narrower, in the run's batch mode; with experts or context groups it is dropped
    ntp-strict  the same, and every sample is computed: the step gets longer
    ntp-pw      the same, and what is left of a degraded domain takes more power, up to the machine's cap
    ... +hot    a spare domain that is ready takes its place, as long as there is one
    ... +cold   the same with spares that are started then; until one is ready the job goes on as without
    ... +spares both
    wait        the same, but the job pauses while a spare is started; without one it goes on narrower
    restart     from the last checkpoint, without the degraded replica; who is repaired comes back at the next restart
    chooser     whatever `planning/actions.py` chooses, loss by loss
"""

import dataclasses
from collections.abc import Mapping

from ntp_plugin.errors import ConfigError
from ntp_plugin.planning.actions import DROP_REPLICA, REDUCE_TP, RESTART, WAIT_FOR_SPARE
from ntp_plugin.simulator.fleet import STRICT

CHOOSER = "chooser"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DomainPolicy:
    """What is done with a domain that has lost GPUs, where no spare takes its place."""

    name: str
    action: str = REDUCE_TP
    mode: str | None = None
    """Of the batch; None: the run's."""
    boosted: bool = False
    whole_groups: bool = False
    hot: bool = False
    cold: bool = False

    @property
    def chooses(self) -> bool:
        return self.name == CHOOSER


POLICIES: Mapping[str, DomainPolicy] = {
    policy.name: policy
    for policy in (
        DomainPolicy(name="dp-drop", action=DROP_REPLICA),
        DomainPolicy(name="group-drop", action=DROP_REPLICA, whole_groups=True),
        DomainPolicy(name="ntp"),
        DomainPolicy(name="ntp-strict", mode=STRICT),
        DomainPolicy(name="ntp-pw", boosted=True),
        DomainPolicy(name="dp-drop+hot", action=DROP_REPLICA, hot=True),
        DomainPolicy(name="dp-drop+cold", action=DROP_REPLICA, cold=True),
        DomainPolicy(name="ntp+hot", hot=True),
        DomainPolicy(name="ntp+cold", cold=True),
        DomainPolicy(name="dp-drop+spares", action=DROP_REPLICA, hot=True, cold=True),
        DomainPolicy(name="ntp+spares", hot=True, cold=True),
        DomainPolicy(name="wait", action=WAIT_FOR_SPARE, hot=True, cold=True),
        DomainPolicy(name="restart", action=RESTART),
        DomainPolicy(name=CHOOSER, hot=True, cold=True),
    )
}


def policy_of(name: str) -> DomainPolicy:
    """The policy of that name."""
    if name not in POLICIES:
        raise ConfigError(f"{name!r} is no policy", fix=f"choose from {', '.join(POLICIES)}")
    return POLICIES[name]
