"""Faults that a process injects into itself. Most of these functions never return."""

import ctypes
import mmap
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_SPOILT_IN_EACH = 256
"""Bytes of a copy."""


def kill() -> None:
    """SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """SIGSTOP."""
    os.kill(os.getpid(), signal.SIGSTOP)


def hang() -> None:
    """Sleep for ever; other threads run."""
    while True:
        time.sleep(3600)


def hold_lock() -> None:
    """Sleep in C code that holds the interpreter lock, so that no thread runs."""
    ctypes.PyDLL(None).pause()  # unlike CDLL, it calls without giving the lock back


def segfault() -> None:
    """Read an address that is not mapped (SIGSEGV)."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


def run_out_of_memory() -> None:
    """Allocate until memory runs out."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGESIZE"), resource.RLIM_INFINITY))
    held = []
    while True:
        held.append(bytearray(1 << 26))


def fill_disk(seconds: float) -> None:
    """Let no file grow for some seconds; what was written stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    back = threading.Timer(seconds, resource.setrlimit, (resource.RLIMIT_FSIZE, (soft, hard)))
    back.daemon = True
    back.start()


def jump_clock(seconds: float) -> None:
    """The clock on the wall, for all Python code of this process that asks `time.time`."""
    real = time.time
    setattr(time, "time", lambda: real() + seconds)  # noqa: B010  (a plain assignment is not for functions)


def spoil_weight(tensors: Iterable[Any], *, seed: int) -> None:
    """One number in one of these becomes twice what it was, as by a flipped bit of its exponent."""
    chosen = random.Random(seed)
    numbers = chosen.choice(list(tensors)).detach().view(-1)
    at = chosen.randrange(numbers.numel())
    numbers[at] = numbers[at] * 2 if float(numbers[at]) else 1.0


def spoil_copy(folder: Path, slot: int, *, seed: int) -> None:
    """Bytes all over the newest whole copy that a slot has made of its own state on this host, so that whoever needs
    any part of it comes upon one."""
    whole = sorted(folder.rglob(f"near-{slot}-*.json"), key=lambda manifest: manifest.stat().st_mtime_ns)
    if not whole:
        return
    chosen = random.Random(seed)
    with whole[-1].with_suffix("").open("r+b") as file, mmap.mmap(file.fileno(), 0) as copy:
        for begin in range(0, len(copy), _SPOILT_IN_EACH):
            copy[chosen.randrange(begin, min(begin + _SPOILT_IN_EACH, len(copy)))] ^= 0x10
