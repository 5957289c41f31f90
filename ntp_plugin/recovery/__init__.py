"""From a death to the next step.

membership/failure_detector.py    PURE: who is gone, from signals to verdicts
trainer.py     what an adapter provides
job_copies.py  copies of what only one rank holds, beside the training and in a recovery
voted_sections.py        a framework's training loop as sections, each of which ends with a vote
replica_comparison.py  replicas compared while they train
comparison_interval.py  PURE: when that is due
exporting.py   a run that is there only to write copies as a checkpoint
joining.py    a process that starts up alone, where its framework asks all others
membership/admission.py   joining ranks come in between two steps, where the members let them
driver.py      the recovery itself
fault_points.py     the moments of a step and of a recovery, for whoever makes something happen there
membership/heartbeat.py   how a rank tells its host's supervisor that it lives and moves
membership/wakeup.py        how the supervisor wakes them when there is a newer epoch
fingerprint.py PURE: what the result of a training depends on, in words that two processes can compare
same_settings.py  all ranks compare these words, and a joining rank with those of the job
data_identity.py  which data a process trains on
rank_context.py       where a process stands in its job, from its environment
script_failure.py  PURE but for its file: an exception of a worker's script, and whether it is the job's error
elastic_rank.py        this process in its job: its connections, its groups, its driver and its heart
"""
