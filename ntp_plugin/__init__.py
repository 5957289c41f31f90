"""A fault-tolerant trainer plugin for Megatron and DeepSpeed: a GPU dies, the job does not.

Importing this package does nothing: no torch, no handlers, no process groups, no threads.
"""

__version__ = "0.1.0"
