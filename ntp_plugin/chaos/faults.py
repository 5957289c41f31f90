"""One strike, and the file by which it is ordered: lines of JSON that are appended, and the run's token in the first.

Orders that are not well-formed, or do not know the token, are passed over and counted: a job is not to be broken by
what somebody has written there by mistake.
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
from ntp_plugin.recovery.fault_points import FAULT_POINTS, OF_STEPS

_LOG = logging.getLogger(__name__)
SUPERVISOR, NODE, CUT, STORE, SLOW = "supervisor", "node", "cut", "store", "slow"
BY_ITS_OWN_HAND = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP: nothing of it runs any more",
    "segfault": "it reads where there is no memory",
    "hang": "its main thread stands still, and its heart beats on",
    "lock": "it stands still in C code that holds the Python lock, so that nothing of it runs",
    "exception": "an error that nobody expects",
    "memory": "it asks for more memory than there is",
    "exit": "its process ends with code 0, too early",
    SLOW: "from then on it sleeps at each such moment: `seconds`, and `factor` - 1 times what it has computed since",
    "disk": "for `seconds` no file of its can grow: EFBIG, as beyond a limit of zero",
    "clock": "its `time.time` in Python jumps by `seconds`",
    "weight": "a bit of one of its weights flips",
    "copy": "bytes all over the newest copy of its state in memory change",
}
FROM_OUTSIDE = {
    "sigkill": "SIGKILL by somebody else, at any instant",
    "sigstop": "SIGSTOP by somebody else",
    "pause": "SIGSTOP, and SIGCONT after `seconds`",
    SUPERVISOR: "SIGKILL for the `ntp run` of a job of one host, which keeps the job's store",
    NODE: "SIGKILL for all that runs on the slot's host, its `ntp run` too",
    CUT: "no packet comes to the slot's host any more, nor goes from it",
    "blink": "the same for `seconds`, and then the link is there again",
    "delay": "from then on each packet from the slot's host takes `seconds`",
    "lossy": "from then on the slot's host loses packets it sends: `seconds` = 0.01 is one in a hundred",
    STORE: "SIGKILL for the job's store, on a machine of its own",
}
OF_HOSTS = frozenset({NODE, CUT, STORE, "blink", "delay", "lossy"})
"""Kinds for which a job must run on several hosts."""
KINDS = {**BY_ITS_OWN_HAND, **FROM_OUTSIDE}
_NAME = re.compile(r"[A-Za-z0-9.-]{1,80}")
_STAYS = {"slow", "disk", "clock", "weight", "copy", "pause", "blink", "delay", "lossy", STORE, SUPERVISOR}
LEAVES_THE_JOB = frozenset(KINDS) - _STAYS
"""Kinds after which the others must go on without the slot."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OrderedFault:
    """What happens to whom, and when. Without a moment: at the next one that the slot comes to."""

    name: str = key(help="of this strike in its campaign")
    what: str = key(help="what breaks", choices=tuple(KINDS))
    slot: str = key(help="r0.s0.t1")
    during: str = key("", help="a moment", choices=("", *FAULT_POINTS))
    step: int | None = key(None, help="the first step that the moment may be of", at_least=1)
    epoch: int | None = key(None, help="the first epoch that a recovery leads to, whose moment it may be", at_least=1)
    seconds: float = key(0.0, help="how long, or how much", at_least=-1e9, at_most=1e9)
    factor: float = key(1.0, help="of slow: its own work takes so many times as long", at_least=1.0, at_most=1e6)
    may_miss: bool = key(False, help="it is no failure where the slot does not come to that moment")

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"{self.name[:50]!r} is no name for a strike", way_out="letters, digits, . and -")

    def is_for(self, slot: str, fault_point: str, step: int | None, epoch: int | None) -> bool:
        """Whether it strikes this slot here."""
        return (
            self.slot == slot
            and self.what in BY_ITS_OWN_HAND
            and self.during in ("", fault_point)
            and _is_reached(self.step, step)
            and _is_reached(self.epoch, epoch)
            and (self.during != "" or fault_point in OF_STEPS)
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Unordered:
    """A strike that still waited when the job was over, and why."""

    fault: OrderedFault
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestedFaults:
    """All that a recipe has asked for, when its job is over."""

    faults: tuple[OrderedFault, ...] = ()
    """That were ordered."""
    unordered: tuple[Unordered, ...] = ()
    drawn: tuple[str, ...] = ()
    """The names of those among the strikes that are not the recipe's own; without those that others were drawn for."""
    to_be_drawn: int = 0


class Orders:
    """The file, as the one who gives them has it."""

    def __init__(self, path: Path, token: str) -> None:
        self.path, self._token = path, token

    @classmethod
    def new(cls, path: Path) -> "Orders":
        """For a run that is going to start."""
        token = secrets.token_hex(16)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(descriptor, json.dumps({"token": token}).encode() + b"\n")
        os.close(descriptor)
        return cls(path, token)

    @classmethod
    def of_a_running_job(cls, path: Path) -> "Orders":
        """Those of a run that is there already; whoever can read the file has the token."""
        way_out = "start the job with ntp run --ntp-run-dir DIR --ntp-chaos"
        try:
            with path.open("rb") as file:
                token = _token_in(file.readline())
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}", way_out=way_out) from None
        if not token:
            raise ConfigError(f"{path} is no file of orders", way_out=way_out)
        return cls(path, token)

    def take_back(self, fault: OrderedFault) -> bool:
        """It shall not strike any more; False where it has."""
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
    """The file, as a worker has it. A look costs one system call where nothing is new."""

    def __init__(self, path: Path) -> None:
        self._path, self._read, self._token = path, 0, ""
        self._waiting: list[OrderedFault] = []
        self.refused = 0
        """Lines that were no orders of this run."""

    def take(self, slot: str, fault_point: str, step: int | None, epoch: int | None) -> list[OrderedFault]:
        """What strikes here; once in all, whichever processes have had the slot."""
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
        except OSError:  # whoever has ordered it has cleaned up
            return
        self._read += len(whole) + bool(whole)
        for line in whole.splitlines():
            if not self._token and (token := _token_in(line)):
                self._token = token
            elif (fault := self._order_in(line)) is not None:
                self._waiting.append(fault)
            else:
                self.refused += 1
                _LOG.warning("%s: a line is no order of this run, and is passed over", self._path)

    def _order_in(self, line: bytes) -> OrderedFault | None:
        try:
            said = json.loads(line)
            token = said.pop("token")
            if not (self._token and hmac.compare_digest(str(token).encode(), self._token.encode())):
                return None
            given = {name: value for name, value in said.items() if value is not None}
            return read(OrderedFault, given, where="")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None


def _claim(orders: Path, fault: OrderedFault) -> bool:
    """Whether nobody has before: neither a process that has had the slot, nor who has taken the order back."""
    folder = orders.with_name(orders.name + ".struck")
    folder.mkdir(exist_ok=True)
    try:
        (folder / fault.name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _is_reached(wanted: int | None, now: int | None) -> bool:
    """An order may come too late for its step; then it is for the next one."""
    return wanted is None or (now is not None and now >= wanted)


def orders_file(run: Path) -> Path:
    """Where the orders for a run are, in its folder."""
    return run / "orders.jsonl"


def worker_words(run: Path) -> tuple[str, ...]:
    """Python's words for a worker that obeys them, before its script. The file is made where nobody has."""
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
        said = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    alone = isinstance(said, dict) and set(said) == {"token"}
    return str(said["token"]) if alone else ""
