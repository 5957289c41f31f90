"""What a job tells of itself, for whoever looks on.

    events.py          what can happen
    record.py          the record: a file of events, written by every process, and read while it grows
    job_state.py       what a job looks like by its events: who is there, how wide, how far
    event_text.py           events in words
    printable.py       text that somebody else wrote, as it may be shown in a terminal
    whereabouts.py     on which machine a process is, and whether it is there
    relay.py           a process that follows the record, for the sinks
    wandb_sink.py      Weights & Biases
    prometheus_sink.py a page of numbers for Prometheus

A worker only ever appends to the record. All else follows it from another process, so that nothing that looks on can
hold up the training, and nothing of it dies with a rank:

    for told in Follower(path).news(): ...

Under `ntp run` there always is a record, unless it was told to keep none.

Public are `read_run`, `Follower`, `RecordedEvent` and the events; who writes a record is the plugin's own matter.
"""

from ntp_plugin.telemetry.events import (
    Began,
    Chosen,
    Committed,
    Compared,
    Copied,
    CopyTrouble,
    Corrupted,
    Ended,
    Event,
    Exported,
    FaultInjected,
    Hung,
    KeyRestored,
    RankLost,
    Recovered,
    Restored,
    Weighed,
)
from ntp_plugin.telemetry.record import Follower, RecordedEvent, read_run
from ntp_plugin.telemetry.record import Teller as Teller
from ntp_plugin.telemetry.record import events_file as events_file

__all__ = [
    "Began",
    "Chosen",
    "Committed",
    "Compared",
    "Copied",
    "CopyTrouble",
    "Corrupted",
    "Ended",
    "Event",
    "Exported",
    "FaultInjected",
    "Follower",
    "Hung",
    "KeyRestored",
    "RankLost",
    "RecordedEvent",
    "Recovered",
    "Restored",
    "Weighed",
    "read_run",
]
