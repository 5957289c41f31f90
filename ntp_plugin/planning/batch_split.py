"""Divides the micro-batches and samples of a step among the replicas.

A replica with `stages` pipeline stages needs (n + stages - 1) x t for n micro-batches of time t; the step ends when
the slowest replica does. The split with the shortest step is found exactly: within a step time T each replica can
run at most T / t - stages + 1 micro-batches, so the least T at which all together can run enough is the optimum. (A
replica that has lost stages has that many fewer.)

Within that optimum survivors keep: a replica keeps its nominal samples up to its limit, and only the excess is dealt to
the others. Modes:

    strict   every sample of the global batch, always
    trim     leaves out at most epsilon of the micro-batches if that shortens the step, but the step never gets shorter
             than the nominal layout's; omitted samples are queued again
    carry    as trim, but omitted samples are owed: at most epsilon at any time. They are repaid when there is room,
             and all in one longer step once omitting the rest of epsilon no longer shortens the step
    shrink   no replica takes more than nominal, and a degraded one only what it can do in a healthy replica's time

A replica whose micro-batches must be smaller (memory) runs each nominal one in `splits`. A replica may get zero
micro-batches; it still joins every collective.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction

from ntp_plugin.config.sections import BatchPolicy
from ntp_plugin.errors import Refused
from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.dealing import deal
from ntp_plugin.planning.spans import Spans


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, order=True)
class ReplicaPace:
    """The speed of a replica: `ns` for each of the `splits` that it splits a nominal micro-batch into. It has
    `without` stages fewer than nominally, so that its pipeline is filled sooner."""

    ns: int
    splits: int = 1
    without: int = 0

    def filling(self, stages: int) -> int:
        """For how many micro-batches the last stage waits until the first one comes to it."""
        return stages - self.without - 1

    def step_ns(self, micro_batches: int, stages: int) -> int:
        return (micro_batches * self.splits + self.filling(stages)) * self.ns if micro_batches else 0

    def cut(self, splits: int) -> "ReplicaPace":
        """The same replica, with each split divided into so many smaller ones."""
        return dataclasses.replace(self, ns=-(-self.ns // splits), splits=self.splits * splits)

    def most_within(self, step_ns: int, stages: int) -> int:
        return max(0, (step_ns // self.ns - self.filling(stages)) // self.splits)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The work of a replica in a step: `count` micro-batches of `size` samples each, of `ns` each by our estimate.

    With context parallelism a context group is what is called a replica here, since samples are shared out to it.
    `kept` and `dealt` number nominal micro-batches: number i holds samples i x micro_batch to (i + 1) x micro_batch
    of the global batch. Numbers beyond the global batch belong to the queue that `carry` repays, oldest first.
    """

    replica: int
    count: int
    size: int
    ns: int
    kept: Spans
    dealt: Spans

    @property
    def numbers(self) -> list[int]:
        """Its nominal micro-batches, in the order in which they are computed."""
        return [number for start, stop in (*self.kept, *self.dealt) for number in range(start, stop)]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchSplit:
    """The shares of one step, and its length: nominal, as planned, and if micro-batches were infinitely divisible."""

    mode: str
    total: int
    shares: tuple[Share, ...]
    left_out: Spans
    repaid: int
    owed: int
    nominal_ns: int
    step_ns: int
    ideal_ns: int

    @property
    def computed(self) -> int:
        """Nominal micro-batches that this step computes."""
        return self.total - sp.size(self.left_out) + self.repaid


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NominalBatch:
    """The batch as the nominal layout divides it."""

    replicas: int
    per_replica: int
    micro_batch: int
    stages: int
    healthy_ns: int

    @property
    def total(self) -> int:
        return self.replicas * self.per_replica


def split_batch(
    paces: Mapping[int, ReplicaPace], nominal: NominalBatch, policy: BatchPolicy, *, owed: int = 0
) -> BatchSplit:
    """Divide the batch among the replicas of `paces` (the surviving ones). `owed`: the debt of earlier `carry`
    steps."""
    _check_splits(paces, nominal.micro_batch)
    stages, total = nominal.stages, nominal.total
    nominal_ns = ReplicaPace(ns=nominal.healthy_ns).step_ns(nominal.per_replica, stages)
    crowd = Counter(paces.values())
    step_ns = nominal_ns if policy.mode == "shrink" else _step_ns(crowd, nominal, policy, owed, nominal_ns)
    limits = {replica: pace.most_within(step_ns, stages) for replica, pace in paces.items()}
    if policy.mode == "shrink":
        limits = {replica: min(limit, nominal.per_replica) for replica, limit in limits.items()}

    repaid = max(0, min(owed, sum(limits.values()) - total))
    held: list[Spans] = [
        ((replica * nominal.per_replica, (replica + 1) * nominal.per_replica),) for replica in range(nominal.replicas)
    ]
    queue = sp.joined([(total, total + repaid)])  # placed in the ring like a lost replica: all of it is dealt
    dealt = deal([*held, queue], room=limits)
    shares = tuple(
        _share(replica, dealt.kept[replica], dealt.dealt[replica], paces[replica], nominal) for replica in sorted(paces)
    )
    computed = total + repaid - sp.size(dealt.left)
    if not computed:
        raise Refused(
            "no replica can finish one micro-batch in the step of a full-width replica", fix="use batch mode strict"
        )
    return BatchSplit(
        mode=policy.mode,
        total=total,
        shares=shares,
        left_out=dealt.left,
        repaid=repaid,
        owed=owed - repaid + sp.size(dealt.left) if policy.mode == "carry" else owed,
        nominal_ns=nominal_ns,
        step_ns=max(
            paces[share.replica].step_ns(sp.size(share.kept) + sp.size(share.dealt), stages) for share in shares
        ),
        ideal_ns=ideal_step_ns(crowd, computed, stages),
    )


def even_shares(members: Collection[int], nominal: NominalBatch) -> dict[int, Share]:
    """Shares of the survivors if all are equally fast and every sample is computed."""
    paces = {replica: ReplicaPace(ns=nominal.healthy_ns) for replica in members}
    return {share.replica: share for share in split_batch(paces, nominal, BatchPolicy()).shares}


def one_for_each(shares: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """Numbers of micro-batches such that no replica has none: an empty one gets the last of the fullest."""
    found = {replica: list(numbers) for replica, numbers in sorted(shares.items())}
    for numbers in found.values():
        if not numbers:
            most = max(found.values(), key=len)
            assert len(most) > 1, "nominally each replica has one or more"
            numbers.append(most.pop())
    return found


def _step_ns(
    crowd: Mapping[ReplicaPace, int], nominal: NominalBatch, policy: BatchPolicy, owed: int, nominal_ns: int
) -> int:
    full = shortest_step_ns(crowd, nominal.total, nominal.stages)
    if policy.mode == "strict":
        return full
    may_leave = math.floor(Fraction(policy.epsilon) * nominal.total) - (owed if policy.mode == "carry" else 0)
    shortened = shortest_step_ns(crowd, nominal.total - max(0, may_leave), nominal.stages)
    shortened = max(shortened, min(full, nominal_ns))
    if policy.mode == "carry" and owed and shortened == full:
        return shortest_step_ns(crowd, nominal.total + owed, nominal.stages)
    return shortened


def shortest_step_ns(crowd: Mapping[ReplicaPace, int], micro_batches: int, stages: int) -> int:
    """The least time in which a crowd (pace -> replicas) can run that many micro-batches."""
    too_short, enough = -1, min(pace.step_ns(micro_batches, stages) for pace in crowd)
    while enough - too_short > 1:
        middle = (too_short + enough) // 2
        if sum(count * pace.most_within(middle, stages) for pace, count in crowd.items()) >= micro_batches:
            enough = middle
        else:
            too_short = middle
    return enough


def ideal_step_ns(crowd: Mapping[ReplicaPace, int], micro_batches: int, stages: int) -> int:
    """The time if micro-batches were infinitely divisible: a lower bound, rounded down."""
    rate, started = Fraction(0), Fraction(0)
    ideal = None
    for pace in sorted(crowd, key=lambda pace: pace.filling(stages) * pace.ns):
        fill = pace.filling(stages) * pace.ns  # a pipeline that is not full by then does not help
        if ideal is not None and ideal <= fill:
            break
        rate += Fraction(crowd[pace], pace.ns * pace.splits)
        started += Fraction(crowd[pace] * pace.filling(stages), pace.splits)
        ideal = (micro_batches + started) / rate
    assert ideal is not None, "a crowd has at least one replica"
    return math.floor(ideal)


def _share(replica: int, kept: Spans, dealt: Spans, pace: ReplicaPace, nominal: NominalBatch) -> Share:
    return Share(
        replica=replica,
        count=(sp.size(kept) + sp.size(dealt)) * pace.splits,
        size=nominal.micro_batch // pace.splits,
        ns=pace.ns,
        kept=kept,
        dealt=dealt,
    )


def _check_splits(paces: Mapping[int, ReplicaPace], micro_batch: int) -> None:
    for replica, pace in paces.items():
        if micro_batch % pace.splits:
            raise Refused(
                f"replica {replica} cannot run a micro-batch of {micro_batch} samples in {pace.splits} equal splits",
                fix=f"choose a number of splits that divides {micro_batch}",
            )
