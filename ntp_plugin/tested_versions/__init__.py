"""Compares the installed framework with the one that the tests ran with, function by function, before a job trains.

The adapters replace functions of Megatron, DeepSpeed and torch, override methods and call private ones. A table has the
signature of each, as the tests had it. At the start of a job with the plugin enabled, they are compared with what is
installed. Where one has changed or is missing, the job is refused with all of their names: a hook with other arguments
might train wrongly. A version that the tests do not know, whose signatures all agree, trains after one line of warning.

    signatures.py            what a function's signature is, as text
    comparison.py            compares what is installed with the tables; refuses, or warns
    megatron.json            megatron-core
    transformer_engine.json  what the Megatron adapter needs of TransformerEngine, where it is installed
    deepspeed.json           DeepSpeed
    torch.json               what all adapters need of torch's private names, and replace of its public ones

`make signatures` writes the tables, from the names in the plugin's own source (`benchmarks/signatures.py`). A changed
meaning behind the same signature is not noticed. Next: `comparison.py`.
"""
