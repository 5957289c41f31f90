"""One fault, and the file that orders it: appended lines of JSON, with the run's token in the first.

Malformed orders, and orders without the token, are skipped and counted: what is written there by mistake must not break
a job.
"""

import dataclasses
import hmac
import json
import logging
import os
import re
import secrets
from pathlib import Path

from ntp_plugin.config.schema import key, read
from ntp_plugin.errors import ConfigError
from ntp_plugin.recovery.fault_points import FAULT_POINTS, STEP_FAULT_POINTS

_LOG = logging.getLogger(__name__)
SUPERVISOR, NODE, CUT, STORE, SLOW = "supervisor", "node", "cut", "store", "slow"
INJECTED_BY_WORKER = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP: no thread of it runs any more",
    "segfault": "it reads an address that is not mapped",
    "hang": "its main thread sleeps, and its heartbeat goes on",
    "lock": "it sleeps in C code that holds the interpreter lock, so that no thread of it runs",
    "exception": "it raises an unexpected error",
    "memory": "it asks for more memory than there is",
    "exit": "its process ends with code 0, too early",
    SLOW: "from then on it sleeps at each such fault point: `seconds`, and `factor` - 1 times its compute time since",
    "disk": "for `seconds` its files cannot grow: EFBIG, as with a file size limit of zero",
    "clock": "its `time.time` in Python jumps by `seconds`",
    "weight": "a bit of one of its weights flips",
    "copy": "bytes throughout the newest copy of its state in memory change",
}
INJECTED_FROM_OUTSIDE = {
    "sigkill": "SIGKILL from another process, at any instant",
    "sigstop": "SIGSTOP from another process",
    "pause": "SIGSTOP, and SIGCONT after `seconds`",
    SUPERVISOR: "SIGKILL for the `ntp run` of a job of one host, which keeps the job's store",
    NODE: "SIGKILL for all processes of the slot's host, its `ntp run` too",
    CUT: "the slot's host neither receives nor sends packets any more",
    "blink": "the same for `seconds`, then the link works again",
    "delay": "from then on each packet from the slot's host takes `seconds`",
    "lossy": "from then on the slot's host loses packets that it sends: `seconds` = 0.01 is one in a hundred",
    STORE: "SIGKILL for the job's store, on a machine of its own",
}
OF_HOSTS = frozenset({NODE, CUT, STORE, "blink", "delay", "lossy"})
"""Kinds that need a job on several hosts."""
KINDS = {**INJECTED_BY_WORKER, **INJECTED_FROM_OUTSIDE}
_NAME = re.compile(r"[A-Za-z0-9.-]{1,80}")
_STAYS = {"slow", "disk", "clock", "weight", "copy", "pause", "blink", "delay", "lossy", STORE, SUPERVISOR}
LEAVES_THE_JOB = frozenset(KINDS) - _STAYS
"""Kinds after which the other ranks must go on without the slot."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OrderedFault:
    """A fault: kind, slot and time. Without a fault point: at the next one that the slot reaches."""

    name: str = key(help="name of the fault in its campaign")
    what: str = key(help="what breaks", choices=tuple(KINDS))
    slot: str = key(help="r0.s0.t1")
    during: str = key("", help="a fault point", choices=("", *FAULT_POINTS))
    step: int | None = key(None, help="the first step in which it may happen", at_least=1)
    epoch: int | None = key(None, help="the first epoch whose recovery it may happen in", at_least=1)
    seconds: float = key(0.0, help="how long, or how much", at_least=-1e9, at_most=1e9)
    factor: float = key(1.0, help="slow only: its own work takes this many times as long", at_least=1.0, at_most=1e6)
    may_miss: bool = key(False, help="it is no failure if the slot does not reach the fault point")

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"{self.name[:50]!r} is no name for a fault", fix="letters, digits, . and -")

    def is_for(self, slot: str, fault_point: str, step: int | None, epoch: int | None) -> bool:
        """Return whether it happens to this slot here."""
        return (
            self.slot == slot
            and self.what in INJECTED_BY_WORKER
            and self.during in ("", fault_point)
            and _is_reached(self.step, step)
            and _is_reached(self.epoch, epoch)
            and (self.during != "" or fault_point in STEP_FAULT_POINTS)
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Unordered:
    """A fault that was not ordered before the job was over, and why."""

    fault: OrderedFault
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestedFaults:
    """All faults that a recipe requested, when its job is over."""

    faults: tuple[OrderedFault, ...] = ()
    """Faults that were ordered."""
    unordered: tuple[Unordered, ...] = ()
    drawn: tuple[str, ...] = ()
    """Names of the randomly drawn faults, without missed ones that were replaced."""
    to_be_drawn: int = 0


class Orders:
    """The orders file, for writing."""

    def __init__(self, path: Path, token: str) -> None:
        self.path, self._token = path, token

    @classmethod
    def new(cls, path: Path) -> "Orders":
        """Create the file for a run that is about to start."""
        token = secrets.token_hex(16)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(descriptor, json.dumps({"token": token}).encode() + b"\n")
        os.close(descriptor)
        return cls(path, token)

    @classmethod
    def of_a_running_job(cls, path: Path) -> "Orders":
        """Open the file of a running job; whoever can read it has the token."""
        fix = "start the job with ntp run --ntp-run-dir DIR --ntp-chaos"
        try:
            with path.open("rb") as file:
                token = _token_in(file.readline())
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}", fix=fix) from None
        if not token:
            raise ConfigError(f"{path} is no file of orders", fix=fix)
        return cls(path, token)

    def cancel(self, fault: OrderedFault) -> bool:
        """Cancel a fault; return False if it was injected already."""
        return _claim(self.path, fault)

    def give(self, fault: OrderedFault) -> None:
        """Append it, in one write."""
        line = json.dumps({"token": self._token, **dataclasses.asdict(fault)}).encode() + b"\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


class Pending:
    """The orders file, as a worker reads it. A check without new orders costs one system call."""

    def __init__(self, path: Path) -> None:
        self._path, self._read, self._token = path, 0, ""
        self._waiting: list[OrderedFault] = []
        self.refused = 0
        """Number of lines that were not orders of this run."""

    def take(self, slot: str, fault_point: str, step: int | None, epoch: int | None) -> list[OrderedFault]:
        """Return the faults to inject here; each is returned once, whichever process has the slot."""
        self._look()
        here = [fault for fault in self._waiting if fault.is_for(slot, fault_point, step, epoch)]
        self._waiting = [fault for fault in self._waiting if fault not in here]
        return [fault for fault in here if _claim(self._path, fault)]

    def _look(self) -> None:
        try:
            if self._path.stat().st_size == self._read:
                return
            with self._path.open("rb") as file:
                file.seek(self._read)
                whole = file.read().rpartition(b"\n")[0]
        except OSError:  # the campaign has removed it
            return
        self._read += len(whole) + bool(whole)
        for line in whole.splitlines():
            if not self._token and (token := _token_in(line)):
                self._token = token
            elif (fault := self._order_in(line)) is not None:
                self._waiting.append(fault)
            else:
                self.refused += 1
                _LOG.warning("%s: skipped a line that is not an order of this run", self._path)

    def _order_in(self, line: bytes) -> OrderedFault | None:
        try:
            fields = json.loads(line)
            token = fields.pop("token")
            if not (self._token and hmac.compare_digest(str(token).encode(), self._token.encode())):
                return None
            given = {name: value for name, value in fields.items() if value is not None}
            return read(OrderedFault, given, where="")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None


def _claim(orders: Path, fault: OrderedFault) -> bool:
    """Return whether this call is the first: no process of the slot carried out the order, and nobody cancelled it."""
    folder = orders.with_name(orders.name + ".struck")
    folder.mkdir(exist_ok=True)
    try:
        (folder / fault.name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _is_reached(wanted: int | None, now: int | None) -> bool:
    """An order that comes too late for its step is for the next one."""
    return wanted is None or (now is not None and now >= wanted)


def orders_file(run: Path) -> Path:
    """Return the path of the orders file in the folder of a run."""
    return run / "orders.jsonl"


def worker_words(run: Path) -> tuple[str, ...]:
    """Return Python's arguments for a worker that obeys orders, before its script; create the orders file if needed."""
    path = orders_file(run)
    try:
        run.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            Orders.new(path)
    except OSError as error:
        raise ConfigError(f"--ntp-run-dir {run} cannot be written to: {error.strerror}") from None
    return "-m", "ntp_plugin.chaos.worker", str(path.absolute())


def _token_in(line: bytes) -> str:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    alone = isinstance(fields, dict) and set(fields) == {"token"}
    return str(fields["token"]) if alone else ""
