"""Whether replicas of different width train as one uniform run does, on the real Megatron.

job.py       one run of Megatron's own pretrain, by the recipe, in ranks of the harness; and what two runs differ by
layouts.py   the models and layouts that it is shown for
spoilt.py    negative controls

The tests and `make show-numerics` use the same.
"""
