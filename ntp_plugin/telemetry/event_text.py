"""Events in words, for whoever is to read of them at once."""

from ntp_plugin.telemetry.events import (
    Chosen,
    CopyTrouble,
    Corrupted,
    Exported,
    FaultInjected,
    Hung,
    KeyRestored,
    RankLost,
    Recovered,
    Restored,
)
from ntp_plugin.telemetry.record import RecordedEvent


def in_words(told: RecordedEvent) -> tuple[str, str] | None:  # noqa: PLR0911  (a sentence for each)
    """A headline and a sentence; None for what happens all the time."""
    event = told.event
    match event:
        case FaultInjected():
            where = f" during {event.fault_point} of step {event.step}" if event.fault_point else ""
            return f"{event.whom} is struck", f"{event.what}{where}"
        case RankLost():
            return f"slot {event.number} is lost", f"pid {event.pid}: {event.reason}" if event.pid else event.reason
        case Hung():
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
