"""Small jobs and losses for hypothesis: small enough that a brute-force check is cheap, odd enough to be unpleasant."""

from hypothesis import strategies as st

from ntp_plugin.config import schema
from ntp_plugin.config.sections import Job
from ntp_plugin.planning.recovery_plan import Nominal
from ntp_plugin.planning.topology import Slot, Topology
from ntp_plugin.planning.units import Family


@st.composite
def families(draw, max_tp=9):
    tp = draw(st.integers(1, max_tp))
    units = draw(st.integers(tp, 12 * tp))
    return Family(name="family", units=units, contiguous=draw(st.booleans())), tp


@st.composite
def patterns(draw, tp):
    """Lost TP slots that leave at least one."""
    return tuple(sorted(draw(st.sets(st.integers(0, tp - 1), max_size=tp - 1))))


@st.composite
def families_with_patterns(draw, max_tp=9):
    family, tp = draw(families(max_tp))
    return family, tp, draw(patterns(tp))


def make_job(**tables) -> Job:
    return schema.read(Job, tables, where="")


@st.composite
def jobs(draw, contexts=(1, 1, 1, 2, 4), **policy):
    """A job of a few dozen slots at most; `contexts`: the sizes of its context groups."""
    tp, pp, cp = draw(st.integers(1, 5)), draw(st.integers(1, 2)), draw(st.sampled_from(contexts))
    dp = draw(st.integers(1, max(2, 4 // cp)))
    groups = tp * draw(st.integers(1, 3))
    heads = groups * draw(st.integers(1, 2))
    return make_job(
        parallel={
            **{"tp": tp, "pp": pp, "cp": cp, "dp": dp, "dp_last": draw(st.booleans())},
            **{"gpus_per_node": draw(st.sampled_from([1, 2, 4])), "nodes_per_rack": 2},
        },
        model={
            "layers": pp,
            "hidden": heads * 2,
            "heads": heads,
            "groups": groups,
            "ffn": tp * draw(st.integers(1, 9)),
            "vocab": draw(st.integers(1, 40)),
            "vocab_multiple": 1,
            "seq": 8,
            "gated": draw(st.booleans()),
            "tied": draw(st.booleans()),
            "bias": draw(st.booleans()),
        },
        batch={"micro_batch": 1, "global_batch": dp * draw(st.integers(1, 6))},
        state={"distributed_optimizer": draw(st.booleans())},
        ntp={
            "min_tp_width": draw(st.integers(1, tp)),
            "granule": 1,
            "route": draw(st.sampled_from(["auto", "direct", "via_core"])),
            "copies": {"count": 0},
        }
        | policy,
    )


@st.composite
def spared_replicas(draw, nominal: Nominal):
    """The replicas of a context group: one of them alone might be idle."""
    topology = nominal.topology
    first = draw(st.integers(0, topology.contexts - 1)) * topology.cp
    return frozenset(range(first, first + topology.cp))


@st.composite
def losses(draw, nominal: Nominal, keep: frozenset[int] = frozenset()):
    """Slots lost anywhere, up to all of a replica; the replicas in `keep`, and one context group in any case, lose
    none."""
    topology = nominal.topology
    spared = keep or draw(spared_replicas(nominal))
    slots = st.builds(
        Slot,
        replica=st.sampled_from([replica for replica in range(topology.dp) if replica not in spared] or [0]),
        stage=st.integers(0, topology.pp - 1),
        tp=st.integers(0, topology.tp - 1),
    )
    if len(spared) == topology.dp:
        return frozenset()
    lost = draw(st.sets(slots, max_size=2 * topology.tp))
    for replica in draw(st.sets(st.integers(0, topology.dp - 1), max_size=1)):
        if replica not in spared:
            lost |= {slot for stage in range(topology.pp) for slot in topology.group(replica, stage)}
    return frozenset(lost)


@st.composite
def situations(draw):
    """(nominal, lost before, lost after): some slots may rejoin, and one replica keeps full width throughout."""
    nominal = Nominal.of(draw(jobs()))
    safe = draw(spared_replicas(nominal))
    return nominal, draw(losses(nominal, safe)), draw(losses(nominal, safe))


@st.composite
def situations_with_joiners(draw):
    """The same without copies, and with slots that are present afterwards but hold nothing."""
    nominal = Nominal.of(draw(jobs()))
    safe = draw(spared_replicas(nominal))
    lost_before, lost, empty = (draw(losses(nominal, safe)) for _ in range(3))
    return nominal, lost_before, lost, None, empty - lost


def job_with_experts(tp=1, dp=4, of_group=2, pp=1):
    return Topology(
        tp=tp, pp=pp, dp=dp, gpus_per_node=8, nodes_per_rack=1, racks_per_power_row=1, expert_slots=of_group
    )


def expert_families(places, each):
    return [Family(name=f"experts {j}", units=places, number=j, each=each) for j in range(each)]


@st.composite
def jobs_with_experts(draw):
    """A job with experts, and lost slots that leave a replica."""
    tp, together = draw(st.sampled_from([(1, 2), (1, 4), (2, 4), (2, 2), (4, 2), (2, 1)]))
    groups = draw(st.integers(1, 3))
    dp = max(1, together // tp) * groups
    topology = job_with_experts(tp=tp, dp=dp, of_group=together, pp=draw(st.integers(1, 2)))
    slots = [slot for replica in range(dp) for stage in range(topology.pp) for slot in topology.group(replica, stage)]
    spared = draw(st.integers(0, dp - 1))
    lost = draw(st.sets(st.sampled_from(slots), max_size=4))
    return topology, frozenset(slot for slot in lost if slot.replica != spared), draw(st.integers(1, 5))
