"""Test whether replicas of different width train as one uniform run does, on the real Megatron.

job.py       one run of Megatron's own pretrain, by the recipe, in ranks of the harness; the differences of two runs
layouts.py   the models and layouts of the comparison
spoilt.py    negative controls
spoilt_experts.py  those of layers of experts
spoilt_context.py  those of context parallelism and gated delta nets
conditions.py  what a job has to bear: full disks, slow writers, gradients that overflow

The tests and `make show-numerics` use the same code.
"""
