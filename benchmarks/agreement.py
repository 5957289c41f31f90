"""Measure how many requests an agreement of many members sends to their one store.

    python -m benchmarks.agreement            `make show-agreement`; counts need no quiet machine, seconds do
    SCALE=ci python -m benchmarks.agreement   fewer members

Real members use a real store: threads of a few processes, each with its own connection, all after the same loss. Each
member reports what a rank of a large job reports: a version of each of 400 tensors, addresses in 24 groups.

The benchmark counts the answered requests per member (mean and maximum), the requests without an answer yet (they
depend on how long the others take, here on a few cores for all), and the kilobytes of the answers. It measures the CPU
seconds of the store, and those in which one member reads all reports when the others have finished.

The claim holds if a member gets at most 24 answers on average, in jobs of every size: it reads two gatherings (reports
and digests of plans) of at most 8 values each, combines 8/7 values in each, and reads the view and its own values. In
the control every member reads what each has written: its count must be higher.
"""

import argparse
import dataclasses
import gc
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from typing import Any

from torch._C._distributed_c10d import TCPStore

from benchmarks import evidence
from ntp_plugin.membership import protocol
from ntp_plugin.membership.agreement import Agreement, publish_lost
from ntp_plugin.membership.gathering import FAN
from ntp_plugin.membership.protocol import Report, View
from ntp_plugin.membership.store import TorchStore, serve
from ntp_plugin.membership.wait_progress import CollectiveWait
from ntp_plugin.recovery.rank_context import first_view

MEMBERS = {"full": (16, 64, 256, 1024), "ci": (16, 64, 128)}
EVERYBODY_READS_ALL = {"full": 256, "ci": 128}
"""The control's members."""
TENSORS, GROUPS = 400, 24
BOUND = 3 * FAN
PROCESSES = 16
PATIENCE_S = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What one member read from the store: answered and unanswered requests, and the bytes of the answers."""

    answered: int
    in_vain: int
    bytes: int


class CountingStore(TorchStore):
    """Counts questions, and bytes of answers as they go over the wire."""

    def __init__(self, connection: TCPStore) -> None:
        super().__init__(connection, corner="ntp/job", token="of the job")
        self.answered = self.in_vain = self.bytes = 0

    def read(self, key: str) -> str | None:
        value = super().read(key)
        self.in_vain += value is None
        return value

    def _own(self, key: str, found: bytes) -> str | None:
        self.answered, self.bytes = self.answered + 1, self.bytes + len(found)
        return super()._own(key, found)


def report_of(slot: int) -> Report:
    """Return a report as large as that of a rank of a large job."""
    held = json.dumps([[4711] * TENSORS, [], [[4711, [17, 901]]]])
    host, port = f"10.{slot // 2048}.{slot // 8 % 256}.{1 + slot % 8}", 30000 + slot * 7 % 20000
    addresses = {f"gloo/{group}": f"gloo:{slot}:-1:0:{host}:{port + 13 * group}" for group in range(GROUPS)}
    return Report(applied=4711, oldest=4711, prepared=True, held=held, addresses=addresses)


def agree(first: View, slot: int, connection: TCPStore, fan: int) -> Asked:
    """One member, from the first view through the agreement on the next."""
    store = CountingStore(connection)
    member = Agreement.founding(store, first, first.member_ids[slot], fan=fan)
    member.run(
        lost=frozenset,
        report=lambda _: report_of(slot),
        plan=lambda agreed: str(agreed.decision),
        waiting=CollectiveWait,
        timeout_s=PATIENCE_S,
    )
    return Asked(answered=store.answered, in_vain=store.in_vain, bytes=store.bytes)


def play(first: View, slots: range, port: int, fan: int, *, begin: Any, results: Any) -> None:
    """Some of the members, in a process of their own."""
    connections = [TCPStore("127.0.0.1", port, None, False) for _ in slots]
    found: list[Asked] = []
    gc.disable()  # it would look at what all of these have read, again and again

    def member(slot: int, connection: TCPStore) -> None:
        found.append(agree(first, slot, connection, fan))

    members = [threading.Thread(target=member, args=pair) for pair in zip(slots, connections, strict=True)]
    begin.wait()
    for each in members:
        each.start()
    for each in members:
        each.join()
    results.put(found)


def measure(members: int, fan: int) -> dict[str, Any]:
    """An agreement of so many, after one more was lost."""
    fork = multiprocessing.get_context("fork")
    server, first = serve("127.0.0.1", 0), first_view(members + 1)
    shares = [range(members)[number::PROCESSES] for number in range(PROCESSES)]
    begin, results = fork.Barrier(len(shares) + 1), fork.Queue()
    playing = [
        fork.Process(target=play, args=(first, share, server.port, fan), kwargs={"begin": begin, "results": results})
        for share in shares
    ]
    for process in playing:
        process.start()
    mine = TorchStore(TCPStore("127.0.0.1", server.port, None, False), corner="ntp/job", token="of the job")
    view = publish_lost(mine, first, [first.member_ids[members]])
    begin.wait()
    since = time.process_time()
    found = [asked for _ in playing for asked in results.get()]
    store_cpu_s = time.process_time() - since
    for process in playing:
        process.join()
    since = time.thread_time()
    reports = protocol.read_reports(view, mine.read, fan)
    reads_s = time.thread_time() - since
    assert reports == {slot: report_of(slot) for slot in range(members)}, "this is what they agreed on"
    return {
        "members": members,
        "fan": fan,
        "answered": round(statistics.fmean(asked.answered for asked in found), 1),
        "most_answered": max(asked.answered for asked in found),
        "in_vain": round(statistics.fmean(asked.in_vain for asked in found), 1),
        "kilobytes": round(statistics.fmean(asked.bytes for asked in found) / 1e3, 1),
        "reading_cpu_s": round(reads_s, 4),
        "store_cpu_s": round(store_cpu_s, 3),
    }


def main() -> int:
    """Show it."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    scale = os.environ.get("SCALE", "full")
    rows = [measure(members, FAN) for members in MEMBERS[scale]]
    control = measure(EVERYBODY_READS_ALL[scale], EVERYBODY_READS_ALL[scale])
    return evidence.show(
        "agreement",
        holds=max(row["answered"] for row in rows) <= BOUND < control["answered"],
        seed=0,
        rows=rows,
        bound=BOUND,
        negative_control=control,
    )


if __name__ == "__main__":
    sys.exit(main())
