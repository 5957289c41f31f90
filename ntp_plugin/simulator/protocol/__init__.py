"""Search for schedules that break the live recovery protocol, under a virtual clock.

The search runs no model. `membership/protocol.py` (views, reports, decisions, the end of the job) and
`membership/failure_detector.py` (which ranks are lost) are the functions that run live. Only their environment is
virtual: the clock, the links of the store and of the collectives, processes that die, freeze and hang, and the times at
which supervisors poll.

A seed draws a `RunSchedule`: the number of slots and hosts, delay and loss of the links, and which fault happens after
how many events. A run has two phases. In the first the faults happen, and the laws of safety are checked after every
event. In the second no new fault happens and messages come soon; then every member that is not lost must end the job
together, within a bounded number of events: liveness.

    virtual_time.py   a clock whose events are functions, and the wires with their delays
    virtual_store.py  keys that are written once, read over a wire
    schedule.py       what a seed draws
    rules.py          the live functions, and seven planted bugs
    laws.py           the laws of safety and liveness
    process.py        one rank: it trains, agrees, resumes, leaves
    host.py           one supervisor: it reads heartbeats, judges, publishes views, starts processes
    job.py            all ranks and supervisors in one run
    search.py         run many seeds; a failure reports its seed and the command that replays it
"""
