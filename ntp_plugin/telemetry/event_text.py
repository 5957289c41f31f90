"""Describes events as sentences, for status pages and alerts."""

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
    SaveFailed,
)
from ntp_plugin.telemetry.record import RecordedEvent


def described(entry: RecordedEvent) -> tuple[str, str] | None:  # noqa: PLR0911  (a sentence for each)
    """Return a headline and a sentence; None for events of every step."""
    event = entry.event
    match event:
        case FaultInjected():
            where = f" during {event.fault_point} of step {event.step}" if event.fault_point else ""
            return f"fault injected into {event.whom}", f"{event.what}{where}"
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
            return f"recovery action: {event.action}", "; ".join(event.table)
        case Recovered():
            who = f"back: {', '.join(event.back)}" if event.back else f"lost: {', '.join(event.lost) or 'nobody'}"
            widths = ", ".join("/".join(map(str, stages)) for stages in event.widths)
            shares = ", ".join(map(str, event.micro_batches))
            return f"the job goes on ({who})", f"after {event.seconds:.2f} s; widths {widths}; micro-batches {shares}"
        case Restored():
            where = f"{event.own:,} bytes of its own, {event.here:,} of this host, {event.elsewhere:,} of others"
            return "state restored from copies", f"{entry.slot}: {where}; {event.again} steps again"
        case Corrupted():
            return f"replicas differ: {', '.join(event.slots)}", f"{event.what} after step {event.step}"
        case CopyTrouble():
            return "trouble with a copy", f"{entry.slot}: {event.what}"
        case SaveFailed():
            return f"the checkpoint of step {event.step} was not saved", f"{event.folder}: {event.why}"
        case Exported():
            return "a checkpoint was written from copies", event.failed or event.folder
    return None
