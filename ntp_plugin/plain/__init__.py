"""Makes an ordinary PyTorch loop survive the loss of ranks: data parallel, or data parallel with tensor parallelism.

    job.py               `elastic_job` and `tensor_parallel_job`, the functions that a script calls
    data_parallel.py     the trainer for data parallelism: every rank is a replica and holds the whole model
    tensor_parallel.py   the trainer for a model whose layers are cut over the ranks of a replica
    voted_step.py        one optimizer step, which the loss of a rank may interrupt anywhere
    parallel_layers.py   linear layers that are cut over the slots of a replica, and a small model
    fingerprints.py      the settings of a rank's training, which all ranks compare

Both trainers compute each step's gradient as (sum of the per-sample gradients of the global batch) / (number of
samples), whichever ranks are left to compute it. The samples of a step are numbered, and `planning/batch_split.py`
deals them: each rank keeps its own, and those of a lost rank go to the others.

Read next: `recovery/`, which drives a trainer through the loss of ranks.
"""
