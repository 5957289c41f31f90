"""Injects faults from outside: a process of its own that knows nothing of a job but pids, signals and what it reports.

    kinds.py        PURE: what each kind of fault sends, to whom, and what may follow
    drawing.py      PURE: which faults come in which order, from a seed
    processes.py    the processes of a job, from /proc; signals to them
    job_view.py     what a job reports: steps, losses, lost ranks
    injector.py     carries out one fault
    leavings.py     processes and files that remain when a job has ended
    job_run.py      one run of the job, with faults in it or without
    checkpoints.py  how far the last checkpoints of two runs are apart
    verdict.py      PURE: which faults led to a wrong result, a hang, or something left behind
    campaign.py     the reference run, and runs with faults until all have been injected

`ntp chaos RECIPE` breaks a job through fault points that its workers carry. Nothing here uses those: the job is started
by the command line that a user types, and its processes get signals at random instants. So it also finds what happens
between two fault points, and what the plugin's own view of a job cannot show. The reference is a run of the same
command without a fault.

A campaign takes its faults from a queue. A run takes as many of them as its steps leave time for; the next run goes on
with the rest. A fault is injected when all ranks train, so that no fault has two causes, at an instant drawn from the
seed.
"""
