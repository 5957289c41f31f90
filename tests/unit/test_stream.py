"""Which micro-batches a rank computes, and its position among them."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ntp_plugin.config.sections import BatchPolicy
from ntp_plugin.planning.batch_split import NominalBatch, ReplicaPace, split_batch
from ntp_plugin.training.stream import MicroBatch, Stream, micro_batches

JOBS = st.fixed_dictionaries(
    {"ranks": st.integers(1, 6), "per_step": st.integers(1, 4), "per_data_epoch": st.integers(1, 9)}
)


def shares(ranks, per_step, members):
    batch = NominalBatch(replicas=ranks, per_replica=per_step, micro_batch=1, stages=1, healthy_ns=1)
    split = split_batch({slot: ReplicaPace(ns=1) for slot in members}, batch, BatchPolicy())
    return [share.numbers for share in split.shares]


@given(JOBS, st.data())
def test_each_micro_batch_of_a_step_is_drawn_once_by_any_members(job, data):
    members = data.draw(st.sets(st.integers(0, job["ranks"] - 1), min_size=1))
    step = data.draw(st.integers(0, 7))
    found = Counter(
        one
        for numbers in shares(job["ranks"], job["per_step"], sorted(members))
        for one in micro_batches(step, numbers, per_step=job["per_step"], per_data_epoch=job["per_data_epoch"])
    )
    counters = range(step * job["per_step"], (step + 1) * job["per_step"])
    assert found == Counter(
        MicroBatch(
            number=replica * job["per_step"] + place,
            data_epoch=counter // job["per_data_epoch"],
            replica=replica,
            index=counter % job["per_data_epoch"],
        )
        for replica in range(job["ranks"])
        for place, counter in enumerate(counters)
    )


@given(JOBS, st.integers(0, 5))
def test_a_nominal_rank_draws_its_own_loader_turn_after_turn(job, replica):
    numbers = range(replica * job["per_step"], (replica + 1) * job["per_step"])
    stream = Stream(per_step=job["per_step"], per_data_epoch=job["per_data_epoch"], numbers=numbers)
    for counter in range(25):
        data_epoch, index = divmod(counter, job["per_data_epoch"])
        number = numbers[counter % job["per_step"]]
        assert stream.peek() == MicroBatch(number=number, data_epoch=data_epoch, replica=replica, index=index)
        stream.draw()


@given(JOBS, st.integers(0, 20), st.integers(0, 4), st.data())
def test_the_lookahead_equals_the_drawn_samples(job, drawn, turns, data):
    members = data.draw(st.sets(st.integers(0, job["ranks"] - 1), min_size=1))
    numbers = shares(job["ranks"], job["per_step"], sorted(members))[0]
    stream = Stream(per_step=job["per_step"], per_data_epoch=job["per_data_epoch"], numbers=numbers)
    for _ in range(drawn):
        stream.draw()
    ahead = list(stream.ahead(turns))
    for one in ahead:
        assert stream.peek() == one
        stream.draw()
    assert stream.peek().data_epoch > turns or not ahead


def test_a_stream_rewinds_to_a_step_with_another_share():
    stream = Stream(per_step=2, per_data_epoch=3, numbers=[0, 1])
    for _ in range(5):
        stream.draw()
    stream.restart(2, [0, 1, 2])
    drawn = []
    for _ in range(3):
        drawn.append(stream.peek())
        stream.draw()
    assert drawn == [
        MicroBatch(number=0, data_epoch=1, replica=0, index=1),
        MicroBatch(number=1, data_epoch=1, replica=0, index=2),
        MicroBatch(number=2, data_epoch=1, replica=1, index=1),
    ]
    assert (stream.step, stream.drawn, stream.restarts) == (3, 0, 1)


@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 20))
def test_the_first_step_of_a_turn_is_the_first_whose_first_micro_batch_is_of_that_turn_or_a_later_one(
    per_step, per_data_epoch, data_epoch
):
    stream = Stream(per_step=per_step, per_data_epoch=per_data_epoch, numbers=range(per_step))
    first = stream.first_step_of(data_epoch)
    assert stream.data_epoch_of(first) >= data_epoch
    assert not first or stream.data_epoch_of(first - 1) < data_epoch
    stream.restart(first, range(per_step))
    assert stream.peek().data_epoch == stream.data_epoch_of(first)


def test_micro_batches_of_the_earlier_data_epoch_are_drawn_first():
    """Whoever needs the number of a micro-batch in hand, for its masks, asks for this order."""
    stream = Stream(per_step=2, per_data_epoch=3, numbers=[1, 2])
    assert stream.order_of(1) == [2, 1]
    assert stream.order_of(0) == [1, 2]
