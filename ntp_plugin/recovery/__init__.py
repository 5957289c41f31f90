"""From a death to the next step.

detector.py    PURE: who is gone, from signals to verdicts
trainer.py     what an adapter provides
job_copies.py  copies of what only one rank holds, beside the training and in a walk
loop.py        a framework's training loop as sections, each of which ends with a vote
replica_watch.py  replicas compared while they train
watch_interval.py  PURE: when that is due
exporting.py   a run that is there only to write copies as a checkpoint
newcomer.py    a process that starts up alone, where its framework asks all others
admission.py   newcomers come in between two steps, where the members let them
driver.py      the walk itself
moments.py     the moments of a step and of a walk, for whoever makes something happen there
heartbeat.py   how a rank tells its host's supervisor that it lives and moves
bell.py        how the supervisor wakes them when there is a newer epoch
fingerprint.py PURE: what the result of a training depends on, in words that two processes can compare
same_settings.py  all ranks compare these words, and a joining rank with those of the job
data_identity.py  which data a process trains on
place.py       where a process stands in its job, from its environment
script_failure.py  PURE but for its file: an exception of a worker's script, and whether it is the job's error
rank.py        this process in its job: its connections, its groups, its driver and its heart
"""
