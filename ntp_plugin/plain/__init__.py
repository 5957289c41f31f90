"""The adapters for an ordinary PyTorch loop: data parallel, every rank a replica, or tensor parallel as well.

    data_parallel.py     a model and an optimizer that survive the death of ranks
    tensor_parallel.py   the same for a model whose layers are cut over the ranks of a replica
    voted_step.py        an optimizer step that a death may interrupt anywhere
    parallel_layers.py   the layers for it, and a small model
    fingerprints.py      what a rank's training depends on, which all ranks compare
    job.py               how a script uses either

Both compute each step's gradient as (sum of the per-sample gradients of the global batch) / (number of
samples), whoever is there to compute it. The samples of a step are numbered, and dealt by `planning/batch_split.py`:
each rank keeps its own, and a lost rank's go to the others.
"""
