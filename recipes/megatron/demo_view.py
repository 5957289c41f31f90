"""What a job looks like by the events that it tells: replicas and slots as a grid in the terminal, or plain lines."""

import time
from collections import deque
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ntp_plugin.telemetry import Began, Committed, Recovered, Told

STARTING, ALIVE, LOST, BACK = "starting", "alive", "lost", "back"
LOOKS = {STARTING: ("◌", "dim"), ALIVE: ("●", "bold blue"), LOST: ("✗", "bold bright_red"), BACK: ("◉", "bold cyan")}
LINE_EVERY = 5
"""Without a terminal: steps from one line to the next."""


class Picture:
    """Everything that was heard of one run."""

    def __init__(self, *, steps: int, replicas: int, tp: int) -> None:
        self.steps, self.replicas, self.tp = steps, replicas, tp
        self.slots = {f"r{replica}.s0.t{slot}": STARTING for replica in range(replicas) for slot in range(tp)}
        self.pids: dict[str, int] = {}
        self.widths = [tp] * replicas
        self.micro_batches = [0] * replicas
        self.step = 0
        self.losses: dict[int, float] = {}
        self.commits: dict[int, dict[str, tuple[float, int]]] = {}
        """Step -> slot -> when it told of it, and in which epoch."""
        self.samples: dict[int, list[int]] = {}
        self.recoveries: dict[int, Recovered] = {}
        """By their epochs, as the first told them."""
        self.layouts: dict[int, tuple[list[int], list[int]]] = {}
        """Epoch -> width and micro-batches of each replica."""
        self.said: list[str] = []
        self.began_at = time.monotonic()

    def hear(self, told: Told) -> None:
        """One event."""
        event = told.event
        if isinstance(event, Began):
            self._began(told.slot, event)
        elif isinstance(event, Committed):
            self._committed(told, event)
        elif isinstance(event, Recovered) and event.epoch not in self.recoveries:
            self._recovered(event)

    def killed(self, slot: str) -> None:
        """By us; the job itself tells what it makes of that."""
        self.slots[slot] = LOST
        self.said.append(f"step {self.step + 1}: {slot} is killed by SIGKILL (pid {self.pids[slot]})")

    def _began(self, slot: str, began: Began) -> None:
        self.pids[slot] = began.pid
        if not began.newcomer:
            self.slots[slot] = ALIVE
            self.micro_batches = began.micro_batches
            self.layouts[0] = (list(self.widths), began.micro_batches)
            if STARTING not in self.slots.values():
                self.said.append(f"all {len(self.slots)} ranks are there: training begins")

    def _committed(self, told: Told, committed: Committed) -> None:
        step = committed.step
        self.commits.setdefault(step, {})[told.slot] = (told.at, committed.epoch)
        self.samples.setdefault(step, []).extend(committed.samples)
        self.losses[step] = next(iter(committed.losses.values()))
        self.step = max(self.step, step)

    def _recovered(self, recovered: Recovered) -> None:
        self.recoveries[recovered.epoch] = recovered
        self.widths = [min(stages) for stages in recovered.widths]
        self.micro_batches = recovered.micro_batches
        self.layouts[recovered.epoch] = (self.widths, self.micro_batches)
        for slot in recovered.lost:
            self.slots[slot] = LOST
        for slot in recovered.back:
            self.slots[slot] = BACK
        widths, shares = _listed(self.widths), _listed(self.micro_batches)
        who = f"{_listed(recovered.back)} came back" if recovered.back else "the others go on"
        self.said.append(
            f"step {self.step + 1}: {who} after {recovered.seconds:.2f} s, widths {widths}, micro-batches {shares}"
        )


class Screen:
    """Shows a picture as it changes."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, refresh_per_second=8) if self._console.is_terminal else None
        self._told, self._line_at = 0, 0

    def __enter__(self) -> "Screen":
        if self._live is not None:
            self._live.start()
        else:
            self._print(self._title)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, picture: Picture) -> None:
        """As it is now."""
        if self._live is not None:
            self._live.update(_panel(self._title, picture))
        else:
            self._lines(picture)

    def _lines(self, picture: Picture) -> None:
        for line in picture.said[self._told :]:
            self._print(f"  {line}")
        self._told = len(picture.said)
        if picture.step >= self._line_at + LINE_EVERY:
            self._line_at = picture.step
            grid = "  ".join(
                "".join(LOOKS[picture.slots[slot]][0] for slot in picture.slots if slot.startswith(f"r{replica}."))
                for replica in range(picture.replicas)
            )
            self._print(f"  step {picture.step:3} of {picture.steps}  loss {picture.losses[picture.step]:.4f}  {grid}")

    def _print(self, line: str) -> None:
        """At once, also into a pipe."""
        print(line, flush=True)


def _panel(title: str, picture: Picture) -> RenderableType:
    return Panel(Group(_grid(picture), Text(), _progress(picture), Text(), _news(picture)), title=title, padding=(1, 2))


def _grid(picture: Picture) -> Table:
    table = Table(box=None, padding=(0, 2))
    table.add_column("")
    for slot in range(picture.tp):
        table.add_column(f"slot {slot}", justify="center", header_style="dim")
    for heading in ("width", "micro-batches"):
        table.add_column(heading, justify="right", header_style="dim")
    for replica in range(picture.replicas):
        states = [picture.slots[f"r{replica}.s0.t{slot}"] for slot in range(picture.tp)]
        cells = [Text(f"{LOOKS[state][0]} {state}", style=LOOKS[state][1]) for state in states]
        width, share = picture.widths[replica], picture.micro_batches[replica] or "-"
        hurt = "bold yellow" if width < picture.tp else ""
        table.add_row(f"replica {replica}", *cells, Text(f"{width} of {picture.tp}", style=hurt), str(share))
    return table


def _progress(picture: Picture) -> RenderableType:
    seconds = time.monotonic() - picture.began_at
    if not picture.step:
        return Text(f"starting {len(picture.slots)} processes that import Megatron: {seconds:.0f} s", style="dim")
    line = Table.grid(padding=(0, 2))
    bar = ProgressBar(
        total=picture.steps, completed=picture.step, width=30, complete_style="blue", finished_style="blue"
    )
    loss = f"loss {picture.losses[picture.step]:.4f}"
    line.add_row(f"step {picture.step} of {picture.steps}", bar, loss, Text(f"{seconds:.0f} s", style="dim"))
    return line


def _news(picture: Picture) -> RenderableType:
    newest = deque(picture.said, maxlen=4)
    return Text("\n".join(newest) if newest else "nothing has happened yet", style="" if newest else "dim")


def _listed(what: list[str] | list[int]) -> str:
    return " and ".join(map(str, what))
