"""Takes a training job from a lost rank to its next step: interrupt, agree, plan, regroup, move state, verify, go on.

An adapter (`ntp_plugin/plain`, `megatron`, `deepspeed`) implements `Trainer`, makes an `ElasticRank` in every process,
and runs each step through its `Driver`. When a rank is lost, the driver recovers and runs the step again.

    driver.py               the recovery: from a lost rank to the agreed step
    trainer.py              what an adapter provides, so that the driver can recover its job
    elastic_rank.py         one process of the job: its store, process groups, driver and heartbeat
    rank_context.py         the job settings that `ntp run` passes to a process in its environment
    voted_sections.py       a training loop as numbered sections, each of which ends with a vote
    joining.py              answers a framework's start-up collectives in a process that starts alone
    job_copies.py           copies of unreplicated state: made beside the training, restored in a recovery
    exporting.py            a run that only writes another run's copies as a checkpoint
    replica_comparison.py   compares the weights of replicas during training, to find silent corruption
    comparison_interval.py  PURE: how many steps lie between two comparisons
    fingerprint.py          PURE: what the result of a training depends on, as names and values to compare
    same_settings.py        raises `Refused` unless all ranks train by the same settings
    data_identity.py        identifies data files by their contents instead of their paths
    script_failure.py       PURE but for its file: reports an exception of the user's script to the supervisor
    fault_points.py         named points of a step and of a recovery, where tests inject faults

Failure detection, agreement, admission and heartbeats are in `ntp_plugin/membership`: read it next.
"""
