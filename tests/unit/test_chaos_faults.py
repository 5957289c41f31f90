"""Orders of faults: obeyed once, by their addressee, and by nobody if they are not orders of this run."""

import json
import random
import stat

import pytest

from ntp_plugin.chaos.faults import OrderedFault, Orders, Pending, orders_file, worker_words
from ntp_plugin.errors import ConfigError

KILL = OrderedFault(name="1", what="kill", slot="r0.s0.t1", during="backward", step=5)
ANYWHERE = OrderedFault(name="2", what="hang", slot="r0.s0.t1")
IN_A_RECOVERY = OrderedFault(name="3", what="kill", slot="r0.s0.t1", during="resume")
INJECTED_FROM_OUTSIDE = OrderedFault(name="4", what="sigkill", slot="r0.s0.t1")


@pytest.fixture
def orders(tmp_path):
    return Orders.new(tmp_path / "orders.jsonl")


def test_a_slot_takes_its_fault_once_at_its_fault_point(orders):
    pending = Pending(orders.path)
    orders.give(KILL)
    assert pending.take("r0.s0.t0", "backward", 5, None) == []
    assert pending.take("r0.s0.t1", "forward", 5, None) == []
    assert pending.take("r0.s0.t1", "backward", 4, None) == []
    assert pending.take("r0.s0.t1", "backward", 5, None) == [KILL]
    assert pending.take("r0.s0.t1", "backward", 5, None) == []


def test_a_late_order_applies_to_the_next_step(orders):
    orders.give(KILL)
    assert Pending(orders.path).take("r0.s0.t1", "backward", 6, None) == [KILL]


def test_a_replacement_does_not_take_the_same_fault(orders):
    orders.give(ANYWHERE)
    assert Pending(orders.path).take("r0.s0.t1", "forward", 5, None) == [ANYWHERE]
    assert Pending(orders.path).take("r0.s0.t1", "forward", 9, None) == []


def test_an_order_can_be_withdrawn_until_it_is_injected(orders):
    orders.give(KILL)
    orders.give(ANYWHERE)
    assert orders.cancel(KILL)
    assert Pending(orders.path).take("r0.s0.t1", "backward", 6, None) == [ANYWHERE]
    assert not orders.cancel(ANYWHERE)


@pytest.mark.parametrize(
    ("fault", "there", "injected"),
    [
        (ANYWHERE, ("vote", 3, None), True),
        (ANYWHERE, ("regroup", None, 1), False),  # a step's, unless a recovery is asked for
        (IN_A_RECOVERY, ("resume", None, 1), True),
        (IN_A_RECOVERY, ("resume", None, 7), True),
        (IN_A_RECOVERY, ("vote", 3, None), False),
        (INJECTED_FROM_OUTSIDE, ("vote", 3, None), False),
    ],
)
def test_an_order_without_a_fault_point_applies_to_the_next_one(orders, fault, there, injected):
    orders.give(fault)
    assert bool(Pending(orders.path).take("r0.s0.t1", *there)) == injected


def test_the_orders_file_is_private_and_never_overwritten(orders):
    assert stat.S_IMODE(orders.path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        Orders.new(orders.path)


def test_orders_of_an_attached_command_are_obeyed(tmp_path):
    worker_words(tmp_path)
    Orders.of_a_running_job(orders_file(tmp_path)).give(KILL)
    assert Pending(orders_file(tmp_path)).take("r0.s0.t1", "backward", 5, None) == [KILL]


@pytest.mark.parametrize("content", [None, b"", b"garbage\n", b'{"token": "a", "more": 1}\n', b"\xff\n"])
def test_a_file_without_orders_is_refused_with_a_reason(tmp_path, content):
    path = tmp_path / "orders.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="--ntp-chaos"):
        Orders.of_a_running_job(path)


def test_an_order_without_the_token_is_not_obeyed(orders):
    with orders.path.open("a") as file:
        for token in ("", "guess", None, 7, ["x"]):
            file.write(json.dumps({"token": token, "name": "x", "what": "kill", "slot": "r0.s0.t1"}) + "\n")
        file.write(json.dumps({"name": "x", "what": "kill", "slot": "r0.s0.t1"}) + "\n")
    pending = Pending(orders.path)
    assert pending.take("r0.s0.t1", "vote", 5, None) == []
    assert pending.refused == 6


def malformed(line, dice):
    """An order with something wrong with it: bytes changed, cut, doubled, or another value in one of its fields."""
    kind = dice.randrange(5)
    if kind == 0:
        return bytes(dice.randrange(256) for _ in range(dice.randrange(200))).replace(b"\n", b"")
    if kind == 1:
        return line[: dice.randrange(len(line))]
    if kind == 2:
        at = dice.randrange(len(line))
        return line[:at] + bytes([dice.choice([0, 9, 34, 44, 123, 125, 200, 255])]) + line[at + 1 :]
    entry = json.loads(line)
    name = dice.choice([name for name in entry if name != "token"]) if kind == 3 else "token"
    entry[name] = dice.choice([[], {}, -1, 1e400, "r0.s0.t1\x00", "killl", True, "9" * 5000, 10**30])
    return json.dumps(entry).encode()


def test_ten_thousand_malformed_orders_break_nothing(orders):
    """Only the given order is taken at the end, and orders that a changed byte has left well-formed."""
    dice, pending = random.Random(1), Pending(orders.path)
    orders.give(KILL)
    whole = orders.path.read_bytes().splitlines()[1]
    injected = []
    for _ in range(100):
        with orders.path.open("ab") as file:
            for _ in range(100):
                file.write(malformed(whole, dice) + b"\n")
        injected += pending.take("r0.s0.t1", "vote", 1, None)
    assert injected == [], "no order was for this fault point"
    assert pending.refused > 9_000
    taken = pending.take("r0.s0.t1", "backward", 5, None)
    assert KILL in taken
    assert all(fault.what == "kill" for fault in taken)
