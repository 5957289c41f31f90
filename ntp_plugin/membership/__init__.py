"""Who is in the job: finds lost ranks, and takes the survivors and joining ranks to one agreed view of the membership.

The supervisor of a host turns signals (a process that ended, a heartbeat that stopped) into failures; the ranks agree
over a small key-value store on the epoch, its members and the step to resume from. Both decisions are pure functions
with time as an argument; `agreement.py` and `heartbeat.py` run them.

    failure_detector.py  PURE: which ranks are lost, from signals and heartbeats
    heartbeat.py         how a rank shows its supervisor that it lives and moves, through shared memory
    wait_progress.py     what a rank shows while it waits for others: that it waits, and that its wait loop polls
    wakeup.py            how the supervisor wakes the ranks of its host when there is a newer epoch
    protocol.py          PURE: agreement on epoch, members and step, over keys that are written once
    gathering.py         PURE: aggregates what all members write, so that each reads few keys
    agreement.py         runs the protocol on a live store
    admission.py         admits joining ranks between two steps
    store.py             the key-value store that the protocol needs, on torch's TCPStore
    restored_keys.py     the same store; keys that a stranger deletes are written again
    running_time.py      time in which this process ran, without what it was stopped for

Imports no package above `errors`. Next: `groups/`, which makes the process groups follow.
"""
