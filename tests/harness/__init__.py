"""What tests and benchmarks share: jobs on real Megatron and DeepSpeed, played in processes that a fault can hit.

played_ranks.py  plays a job in ranks, with faults and returns, and collects what they report
parity/          a Megatron job, what each rank saw of it, and how to compare two of them
zero/            the same for DeepSpeed
"""
