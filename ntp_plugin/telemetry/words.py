"""Events in words, for whoever is to read of them at once."""

from ntp_plugin.telemetry.events import (
    Chosen,
    CopyTrouble,
    Corrupted,
    Exported,
    Gone,
    KeyRestored,
    Recovered,
    Restored,
    Struck,
    Stuck,
)
from ntp_plugin.telemetry.record import Told


def in_words(told: Told) -> tuple[str, str] | None:  # noqa: PLR0911  (a sentence for each)
    """A headline and a sentence; None for what happens all the time."""
    event = told.event
    match event:
        case Struck():
            where = f" during {event.moment} of step {event.step}" if event.moment else ""
            return f"{event.whom} is struck", f"{event.what}{where}"
        case Gone():
            return f"slot {event.number} is lost", f"pid {event.pid}: {event.reason}" if event.pid else event.reason
        case Stuck():
            return (
                "all wait for each other",
                f"{event.waiting} ranks, for {event.seconds:g} s: their operations do not match",
            )
        case KeyRestored():
            return "somebody else writes to the job's store", event.what
        case Chosen():
            return f"what is done about it: {event.action}", "; ".join(event.table)
        case Recovered():
            who = f"back: {', '.join(event.back)}" if event.back else f"lost: {', '.join(event.lost) or 'nobody'}"
            widths = ", ".join("/".join(map(str, stages)) for stages in event.widths)
            shares = ", ".join(map(str, event.micro_batches))
            return f"the job goes on ({who})", f"after {event.seconds:.2f} s; widths {widths}; micro-batches {shares}"
        case Restored():
            where = f"{event.own:,} bytes of its own, {event.here:,} of this host, {event.elsewhere:,} of others"
            return "state comes from copies", f"{told.slot}: {where}; {event.again} steps again"
        case Corrupted():
            return f"replicas differ: {', '.join(event.slots)}", f"{event.what} after step {event.step}"
        case CopyTrouble():
            return "trouble with a copy", f"{told.slot}: {event.what}"
        case Exported():
            return "a checkpoint was made of copies", event.failed or event.folder
    return None
