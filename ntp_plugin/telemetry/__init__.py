"""Records what happens to a job, and shows it: in a file, in Weights & Biases, for Prometheus.

    events.py           the events that a job records
    record.py           the record: a file of events, which every process appends to, and its reader
    job_state.py        the state of a job, rebuilt from its events: slots, widths, steps
    event_text.py       events as sentences
    printable.py        strips terminal sequences from text of other programs
    whereabouts.py      tells on which machine a process runs, and whether it still lives
    relay.py            the process that follows the record and feeds the sinks
    wandb_sink.py       sink for Weights & Biases
    prometheus_sink.py  sink for Prometheus: a page of metrics

A worker only appends to the record. Everything else follows the record from another process. So no reader can delay
the training, and no reader dies with a rank:

    for entry in Follower(path).news(): ...

`ntp run` keeps a record unless it is asked not to.

`read_run`, `Follower`, `RecordedEvent` and the events are public. Writing a record is internal to the plugin.
Next: `record.py`, then `launch/`, which starts the relay.
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
    SaveFailed,
    Weighed,
)
from ntp_plugin.telemetry.record import EventWriter as EventWriter
from ntp_plugin.telemetry.record import Follower, RecordedEvent, read_run
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
    "SaveFailed",
    "Weighed",
    "read_run",
]
