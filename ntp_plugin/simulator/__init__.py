"""What a loss costs, and whether the protocol holds, without a cluster.

Nothing here touches a device, a clock or a network. Randomness comes from a seed that the caller gives, so that a seed
is a run. torch is not imported. What decides is never of this room: layouts, paces and batches are the planner's, the
choice is `planning/actions.py`'s, agreement and detection are the live ones.

    machine.py     what a GPU and its links can do; machines/ has the data, each constant beside its source
    step_time.py   how long a step takes on a layout
    fleet.py       what a cluster yields with given losses
    failures.py    when what fails: drawn from rates, or replayed
    traces.py      outages from a file
    policies.py    what each policy does about a loss
    options.py     the ways in which an action can be carried out, domain by domain
    setting.py     what all policies of a run have in common, and how each of them did
    timeline.py    one policy through all faults of a run
    snapshot.py    with a part of the GPUs gone; and how many spares keep a batch whole
    scenario.py    what `ntp simulate` is told, checked
    report.py      from what was asked to what came of it
    protocol/      the live agreement and detector under a virtual clock: a seeded search over schedules
"""
