"""Decides who is in the job: finds lost ranks, and takes survivors and joining ranks to one agreed view of the members.

The supervisor of a host turns signals (a process that ended, a heartbeat that stopped) into failures; the ranks agree
over a small key-value store on the epoch, its members and the step to resume from. Both decisions are pure functions
with time as an argument; `agreement.py` and `heartbeat.py` run them.

    failure_detector.py  finds lost ranks from signals and heartbeats. Pure
    heartbeat.py         shows the supervisor of a host that its ranks live and move, through shared memory
    wait_progress.py     records that a process waits for others, and that its wait loop still polls
    wakeup.py            wakes the ranks of a host when there is a newer epoch
    protocol.py          agreement on epoch, members and the step to resume from, over write-once keys. Pure
    gathering.py         aggregates the values that all members write, so that each reads few keys. Pure
    agreement.py         runs the protocol on a live store
    admission.py         admits joining ranks between two steps
    store.py             the key-value store of the protocol, on torch's TCPStore
    restored_keys.py     writes keys again that another program deletes from the store
    running_time.py      measures time without the pauses in which this process was stopped

This package imports no other except `errors`. Next: `groups/`, which edits the process groups to the agreed view.
"""
