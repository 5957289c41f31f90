"""Show a running job in the terminal: a live grid of its slots, or plain lines where the output is no terminal.

Terminal sequences are stripped from everything that comes from the record: other users may have written there.
"""

import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ntp_plugin.telemetry.event_text import described
from ntp_plugin.telemetry.events import Recovered
from ntp_plugin.telemetry.job_state import JobState, SlotState
from ntp_plugin.telemetry.printable import printable
from ntp_plugin.telemetry.record import RecordedEvent

LOOKS = {
    SlotState.STARTING: ("◌", "dim"),
    SlotState.ALIVE: ("●", "bold blue"),
    SlotState.LOST: ("✗", "bold bright_red"),
    SlotState.BACK: ("◉", "bold cyan"),
}
LINE_EVERY = 5
"""Steps between two lines of progress, without a terminal."""
_ROWS, _COLUMNS = 16, 16
"""Most rows (stages of replicas) of the grid; with more columns (slots of a stage) it shows widths alone."""
_NEWS = 6
_SILENT_S = 10.0


class Screen:
    """View of one job."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._title = printable(title)
        self._console = console or Console(highlight=False)
        self._live = Live(console=self._console, refresh_per_second=8) if self._console.is_terminal else None
        self._news: deque[str] = deque(maxlen=_NEWS)
        self._headlines: set[str] = set()
        self._began_at, self._line_at = time.monotonic(), 0

    def __enter__(self) -> "Screen":
        if self._live is not None:
            self._live.start()
        else:
            print(self._title, flush=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, job: JobState, news: Sequence[RecordedEvent]) -> None:
        """Show the current state, and the events since the last call."""
        for line in self._lines(job, news):
            self._news.append(line)
            if self._live is None:
                print(f"  {line}", flush=True)
        if self._live is not None:
            self._live.update(Panel(Group(*self._parts(job)), title=Text(self._title), padding=(1, 2)))
        elif job.step >= self._line_at + LINE_EVERY:
            self._line_at = job.step
            grid = "  ".join("".join(LOOKS[state][0] for _, state in row) for row in _rows(job)[:_ROWS])
            print(f"  step {job.step:4}  {_losses(job)}  {grid}", flush=True)

    def _lines(self, job: JobState, news: Sequence[RecordedEvent]) -> list[str]:
        lines = []
        for recorded in news:
            words = described(recorded)
            if words is not None and words[0] not in self._headlines:  # every surviving rank reports the same
                is_new_epoch = isinstance(recorded.event, Recovered)
                self._headlines = {words[0]} if is_new_epoch else self._headlines | {words[0]}
                lines.append(printable(f"step {job.step + 1}: {words[0]}: {words[1]}"))
        return lines

    def _parts(self, job: JobState) -> list[RenderableType]:
        if not job.slots:
            return [Text(f"starting: {time.monotonic() - self._began_at:.0f} s", style="dim")]
        heard = time.time() - job.heard_at
        line = f"step {job.step}   {_losses(job)}   {job.step_s:.2f} s a step   goodput {job.goodput:.1%}"
        silent = f"no events for {heard:.0f} s" if heard > _SILENT_S and not job.ended else ""
        news = Text("\n".join(self._news) or "no faults or recoveries yet")
        return [_grid(job), Text(), Text(line), Text(silent, style="bold yellow"), news]


def _rows(job: JobState) -> list[list[tuple[str, SlotState]]]:
    """Return one row for each stage of each replica: its slots and their states."""
    named = [
        [f"r{replica}.s{stage}.t{slot}" for slot in range(job.tp)]
        for replica in range(job.replicas)
        for stage in range(job.stages)
    ]
    return [[(slot, job.slots[slot]) for slot in row] for row in named]


def _grid(job: JobState) -> Table:
    table = Table(box=None, padding=(0, 2))
    table.add_column("")
    few = job.tp <= _COLUMNS
    for slot in range(job.tp if few else 0):
        table.add_column(f"t{slot}", justify="center", header_style="dim")
    for heading in ("width", "micro-batches"):
        table.add_column(heading, justify="right", header_style="dim")
    rows = _rows(job)
    degraded_first = sorted(
        range(len(rows)), key=lambda at: (all(state != SlotState.LOST for _, state in rows[at]), at)
    )
    for at in sorted(degraded_first[:_ROWS]):
        replica, stage = divmod(at, job.stages)
        width = job.widths[replica][stage]
        cells = [Text(f"{LOOKS[state][0]} {state}", style=LOOKS[state][1]) for _, state in rows[at]] if few else []
        style = "bold yellow" if width < job.tp else ""
        name = f"replica {replica}" + f" stage {stage}" * (job.stages > 1)
        table.add_row(name, *cells, Text(f"{width} of {job.tp}", style=style), str(job.micro_batches[replica]))
    if len(rows) > _ROWS:
        table.add_row(Text(f"and {len(rows) - _ROWS} more", style="dim"))
    return table


def _losses(job: JobState) -> str:
    return "  ".join(f"{printable(name)} {value:.4f}" for name, value in job.losses.items())
