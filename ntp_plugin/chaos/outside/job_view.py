"""What a job reports, as anybody can read it: the record of the run, or else lines of its output.

The record has every step of every rank with its loss in full precision, and each rank that a supervisor has found
lost. A job whose script does not write steps there prints them: a line with the step and the loss, and perhaps the
rank, by a regular expression.
"""

import dataclasses
import re
import time
from collections.abc import Sequence
from pathlib import Path

from ntp_plugin.errors import Excluded
from ntp_plugin.telemetry import Began, Committed, Follower, RankLost, RecordedEvent

LINE = (
    r"(?:rank (?P<rank>\d+): )?(?:step|iteration)\s+(?P<step>\d+)(?:/\s*\d+)?\b.*?loss:?\s*"
    r"(?P<loss>[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|nan|inf))"
)
"""What a line of the output is looked for by, if nothing else is given."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompletedStep:
    """A step that a rank has completed."""

    at: float
    """By the clock on the wall."""
    rank: int | None
    """None: the line does not say which."""
    step: int
    loss: float | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Noticed:
    """A supervisor has found a rank lost."""

    at: float
    rank: int
    left_out: bool = False
    """It has ended because the others had gone on without it, with its replica perhaps."""


class JobView:
    """What a job has reported so far."""

    def __init__(self, folder: Path, log: Path, *, line: str = LINE) -> None:
        """`folder` has the record, `log` the output."""
        self._follower, self._log, self._line = Follower(folder), log, re.compile(line)
        self._read, self._rest = 0, b""
        self._recorded: list[CompletedStep] = []
        self._printed: list[CompletedStep] = []
        self._numbers: dict[str, int] = {}
        self.noticed: list[Noticed] = []
        self.rank_of_pid: dict[int, int] = {}
        """Of processes that have begun to train, where the record says so."""
        self.newest = 0
        """The last step that any rank has completed."""
        self.newest_of: dict[int, int] = {}
        """And each rank."""

    @property
    def is_recorded(self) -> bool:
        """Whether the record has steps."""
        return bool(self._recorded)

    @property
    def reports(self) -> Sequence[CompletedStep]:
        """In the order in which they came: from the record, or if it has none from the output.

        Where lines say which rank they are of, others do not count: a summary at the end, say, with fewer digits.
        """
        of_ranks = [report for report in self._printed if report.rank is not None]
        return self._recorded or of_ranks or self._printed

    def look(self) -> None:
        """Read what is new."""
        for recorded in sorted(self._follower.news(), key=lambda one: one.at):
            self._hear(recorded)
        self._read_output()

    def _hear(self, recorded: RecordedEvent) -> None:
        match recorded.event:
            case Began(number=number, pid=pid):
                self._numbers[recorded.slot] = self.rank_of_pid[pid] = number
                self.newest_of.pop(number, None)
            case Committed(step=step, losses=losses):
                rank, loss = self._numbers.get(recorded.slot), next(iter(losses.values()), None)
                self._recorded.append(CompletedStep(at=recorded.at, rank=rank, step=step, loss=loss))
                self._count(rank, step)
            case RankLost(number=number, kind=kind, reason=reason):
                left_out = kind == "ended" and reason.endswith(f" code {Excluded.exit_code}")
                self.noticed.append(Noticed(at=recorded.at, rank=number, left_out=left_out))
                self.newest_of.pop(number, None)
            case _:
                pass

    def _read_output(self) -> None:
        if not self._log.exists():
            return
        with self._log.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        self._read += len(new)
        lines = (self._rest + new).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            self._read_line(line.decode(errors="replace"))

    def _read_line(self, line: str) -> None:
        for found in self._line.finditer(line):  # lines of several ranks may come in one
            fields = found.groupdict()
            try:
                step, loss = int(fields["step"]), float(fields["loss"])
                rank = None if fields.get("rank") is None else int(fields["rank"])
            except (ValueError, AttributeError):
                continue
            self._printed.append(CompletedStep(at=time.time(), rank=rank, step=step, loss=loss))
            if not self._recorded:
                self._count(rank, step)

    def _count(self, rank: int | None, step: int) -> None:
        self.newest = max(self.newest, step)
        if rank is not None:
            self.newest_of[rank] = step
