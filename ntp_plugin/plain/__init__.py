"""The adapter for an ordinary PyTorch loop: data parallel, every rank a replica.

    data_parallel.py   a model and an optimizer that survive the death of ranks

`DataParallel` computes each step's gradient as (sum of the per-sample gradients of the global batch) / (number of
samples), whoever is there to compute it. The samples of a step are numbered, and dealt by `planning/batch_split.py`:
each rank keeps its own, and a lost rank's go to the others.
"""
