"""The live protocol under a virtual clock: a seeded search over schedules.

What is searched is not a model. `membership/protocol.py` (views, reports, decisions, the end of the job) and
`membership/failure_detector.py` (who is gone) are the functions that run live; only what surrounds them is virtual:
the clock, the store's wire, the wire of the collectives, processes that die, freeze and hang, and the supervisors'
looks.

A seed draws a `RunSchedule`: how many slots and hosts, how slow and how lossy the wires are, what befalls whom after
how many events. A run has two phases. In the first the faults happen, and the laws of safety are looked at after every
event. In the second nothing new befalls anybody and messages come soon; then everybody who is not out must end the job
together, within a bounded number of events: liveness.

    virtual_time.py   a clock whose events are functions, and the wires with their delays
    virtual_store.py  keys that are written once, read over a wire
    schedule.py       what a seed draws
    rules.py          the live functions, and seven ways to get them wrong
    laws.py           what must hold
    process.py        one rank: it trains, agrees, stands, leaves
    host.py           one supervisor: it looks at beats, judges, publishes, starts anew
    job.py            all of them in one run
    search.py         many seeds; a failure says its seed and how to see it again
"""
