"""Plans what every rank does after a loss, as a function of the nominal layout and the lost slots.

Pure: no torch, no clock, no randomness, no state between calls. Every survivor computes the same plan from the same
facts, in whatever order the losses came.

    spans.py            sets of whole numbers as runs
    layer_placement.py  which stage of each replica has which layers
    sequence_rows.py    which rows of a sequence each slot of a group holds
    dealing.py          the one rule: survivors keep, orphans are dealt
    topology.py         slots, the nominal layout, and the replicas that survive losses
    units.py            which tensors are sharded, along which dim, in which units
    shard_layout.py     which slot of a group holds which units
    lanes.py            which ranks reduce which units together: the direct route
    expert_groups.py    which slot holds which experts, and which slots sum their gradients
    core_route.py       the other route, over core slots inside each scale-up domain
    routes.py           the cost of each route, and the choice between them
    pace.py             the time of a micro-batch on a layout
    batch_split.py      micro-batches and samples per replica
    layer_cuts.py       where the layers of a lost stage go
    copy_placement.py   which host holds whose far copy
    parity_groups.py    which slots share a parity, and which host holds it
    transfers.py        the state that moves between two layouts, with its sources
    memory_fit.py       bytes per slot, and the remedies if they do not fit
    expert_changes.py   which experts change slots, and where their state is
    actions.py          the choice of an action after a loss
    recovery_plan.py    the complete plan, with a digest
    decision.py         whether a running job continues by such a plan, or ends for a restart
    survival.py         which losses a job survives, and where the lost state comes from
    job_plan.py         `plan`: the plan for a described job and its losses
    job_check.py        what `ntp check` finds out about a job before it runs

Imports only go up this list: each file depends on those above it.

`plan`, `read_job`, the sections that describe a job to them, and the parts of a plan are public. Next:
`recovery_plan.py`, then `recovery/`, which carries a plan out.
"""

from typing import TYPE_CHECKING

from ntp_plugin.lazy_exports import lazy_exports

__all__ = [
    "ActionsPolicy",
    "Batch",
    "BatchPolicy",
    "BatchSplit",
    "CopyPolicy",
    "GroupChange",
    "Hardware",
    "Job",
    "Model",
    "Parallel",
    "Policy",
    "RecoveryPlan",
    "Slot",
    "State",
    "plan",
    "read_job",
]

if TYPE_CHECKING:
    from ntp_plugin.config.sections import (
        ActionsPolicy,
        Batch,
        BatchPolicy,
        CopyPolicy,
        Hardware,
        Job,
        Model,
        Parallel,
        Policy,
        State,
    )
    from ntp_plugin.planning.batch_split import BatchSplit
    from ntp_plugin.planning.job_plan import plan, read_job
    from ntp_plugin.planning.recovery_plan import GroupChange, RecoveryPlan
    from ntp_plugin.planning.topology import Slot
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "ntp_plugin.config.sections": (
                "ActionsPolicy",
                "Batch",
                "BatchPolicy",
                "CopyPolicy",
                "Hardware",
                "Job",
                "Model",
                "Parallel",
                "Policy",
                "State",
            ),
            "ntp_plugin.planning.batch_split": ("BatchSplit",),
            "ntp_plugin.planning.job_plan": ("plan", "read_job"),
            "ntp_plugin.planning.recovery_plan": ("GroupChange", "RecoveryPlan"),
            "ntp_plugin.planning.topology": ("Slot",),
        },
    )
