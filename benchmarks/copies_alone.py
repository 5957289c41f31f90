"""Measure copies in processes that do nothing else: their speed and their number of bytes.

The processes copy the state of torch's Adam, which they look up each time, as in a job. All processors copy at once, so
that they share the memory bandwidth. Speeds are bytes per second of processor time of all threads of a process. Before
each copy the caches of a processor are filled with other data, which is not counted: in a job the step fills them, and
a copy finds neither its bytes nor its code there. The time of copies made back to back is reported as well.
"""

import functools
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ntp_plugin.copies import digest
from ntp_plugin.copies.manifest import Version
from ntp_plugin.copies.replicator import Replicator, Snapshot
from ntp_plugin.copies.runs import runs_of
from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.copies.store import Store
from ntp_plugin.copies.wire import Server
from ntp_plugin.reduction.stepped import Stepped, parts
from tests.harness.parity.layouts import BASE, MODELS

RANKS, TP = 4, 2
PARTS = 26
"""That a rank has of the model's tensors."""
NUMBERS = 3
"""Main weights and two moments."""
SHARERS = (0, 1)
"""Of a parity."""
GENERATORS = 4
"""States of random number generators with as many bytes as torch's, which a manifest contains."""
CACHES = 1 << 26
"""More bytes than all of a processor's caches hold."""
COPIES = 15


def speed_of_digests() -> float:
    """Bytes a second on each processor while all do the same."""
    return statistics.mean(_on_all_processors(_speed_of_digests))


def speeds(mode: str) -> tuple[float, float, int]:
    """The same of all that copies of this kind take, near, far or as a part in a parity, and where each comes right
    after another; and the bytes that a parity host has then of what two ranks hold."""
    after_others, at_once, kept = zip(*_on_all_processors(functools.partial(_speeds, mode)), strict=True)
    return statistics.mean(after_others), statistics.mean(at_once), kept[0]


def _on_all_processors[Found](work: Callable[[int], Found]) -> list[Found]:
    count, context = os.cpu_count() or 1, multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, _begin, (context.Barrier(count),)) as processors:
        return list(processors.map(work, range(count)))


_wait_for_all: list[Any] = []
"""In a process of these: what lets them begin together."""


def _begin(barrier: Any) -> None:
    _wait_for_all.append(barrier)


def _speed_of_digests(_processor: int) -> float:
    torch.set_num_threads(1)
    size = 1 << 24
    values = [torch.randn(size) for _ in range(NUMBERS)]
    runs = runs_of((size,), 0, ((0, size),))
    return _speed(lambda: digest.digests(values, runs, salts=["a", "b", "c"]), NUMBERS * size * 4)


def _speeds(mode: str, _processor: int) -> tuple[float, float, int]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        return _speeds_of_copies(Path(folder), mode)


def _speeds_of_copies(folder: Path, mode: str) -> tuple[float, float, int]:
    """Speeds of copies of two ranks' parts of the model, one after the other."""
    size = bytes_wanted() // RANKS
    stepped = [_stepped(number, size // NUMBERS // 4 // PARTS) for number in range(PARTS)]
    optimizer = torch.optim.Adam([one.parameter for one in stepped])
    optimizer.step()
    server = Server(Store(folder / "there"), run="r", secret="s", host="127.0.0.1", report=_fail)
    replicators = [
        Replicator(Store(folder / f"{slot}"), run="r", secret="s", slot=slot, trouble=_fail) for slot in SHARERS
    ]
    for replicator in replicators:
        replicator.send_to([] if mode == "near" else [server.address], members=SHARERS if mode == "xor:2" else ())

    def copy(step: int) -> None:
        for replicator in replicators:
            of_it, version = parts(stepped, optimizer), Version(step=step, epoch=0)
            replicator.begin(Snapshot(version=version, holders=SHARERS, parts=of_it, extras=_extras()))
            replicator.wait()
            assert replicator.ok, "it is where it should be"
        for replicator in replicators:
            replicator.commit()

    copy(0)
    copy(1)
    steps = itertools.count(2)
    filler, made = torch.empty(CACHES // 4), len(SHARERS) * size
    speed = _speed(lambda: copy(next(steps)), made, before=filler.zero_)
    speed_at_once = _speed(lambda: copy(next(steps)), made)
    for replicator in replicators:
        replicator.close()
    server.close()
    return speed, speed_at_once, sum(path.stat().st_size for path in (folder / "there").iterdir() if not path.suffix)


def kept_wanted(mode: str) -> int:
    """Two versions of what the ranks hold, or of a parity of it; each value begins at a multiple of 64 bytes."""
    values = NUMBERS * PARTS
    one = values * -(-(bytes_wanted() // RANKS // values // 4 * 4) // 64) * 64
    return 2 * one * {"near": 0, "copy": len(SHARERS), "xor:2": 1}[mode]


def _stepped(number: int, size: int) -> Stepped:
    tensor_slice = TensorSlice(
        tensor=f"layers.{number}.weight", shape=(size,), dim=0, ranges=((0, size),), start=0, stop=size
    )
    parameter = torch.nn.Parameter(torch.randn(size))
    parameter.grad = torch.randn(size)
    return Stepped(parameter=parameter, tensor_slices=((tensor_slice, 0),))


def _extras() -> dict[str, Any]:
    return {"random": [torch.get_rng_state().numpy().tobytes() for _ in range(GENERATORS)]}


def _fail(what: str) -> None:
    raise AssertionError(what)


def _speed(work: Callable[[], object], size: int, before: Callable[[], object] = lambda: None) -> float:
    """Bytes per second of all threads' processor time."""
    _wait_for_all[0].wait()
    times = []
    for _ in range(COPIES):
        before()
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return size / statistics.median(times)


def bytes_wanted(tp: int = TP) -> int:
    """Bytes of one version of all ranks together."""
    hidden, ffn, layers, heads, groups, channels = 256, 640, 4, 16, _groups(), 16
    vocabulary = -(-2000 // (32 * tp)) * 32 * tp
    cut = 2 * vocabulary * hidden
    cut += layers * (hidden * (heads + 2 * groups) * channels + heads * channels * hidden + 3 * hidden * ffn)
    replicated = (2 * layers + 1) * hidden
    return (cut + tp * replicated) * NUMBERS * 4


def _groups() -> int:
    words = MODELS[BASE].split()
    return int(words[words.index("--num-query-groups") + 1])


def explained(off: float, speed: float, others: float = 0.0) -> float:
    """The ratio if all ranks' copies were made in time of the step, on all processors, as fast as by processes that do
    nothing else, and all other threads took so many more processor seconds."""
    return 1 + (bytes_wanted() / speed + others) / (os.cpu_count() or 1) / off
