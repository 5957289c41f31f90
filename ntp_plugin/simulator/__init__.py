"""Simulate, without a cluster, what GPU losses cost a job and whether the recovery protocol is safe: `ntp simulate`.

Nothing here uses a device, a clock or a network, and torch is not imported. All randomness comes from the caller's
seed, so a seed reproduces a run. The decisions are not reimplemented: layouts, paces and batches come from the planner,
actions from `planning/actions.py`, agreement and failure detection from the live code.

    machine.py     performance of a GPU and its links; machines/ has the constants, each with its source
    step_time.py   time of a step on a layout
    fleet.py       throughput of a cluster with given losses
    failures.py    draw failures from rates, or replay them from a trace
    traces.py      read outages from a file
    policies.py    how each policy reacts to a loss
    options.py     the ways to carry out an action, domain by domain
    setting.py     inputs that all policies of a run share, and the result of each policy
    timeline.py    run one policy through all failures
    snapshot.py    throughput with a fraction of the GPUs lost; spares needed to keep the full batch
    scenario.py    the checked options of `ntp simulate`
    report.py      run a simulation and build its report
    protocol/      run live agreement and detection under a virtual clock, over many seeded schedules

Read next: `scenario.py`, then `timeline.py`; for the protocol `protocol/__init__.py`.
"""
