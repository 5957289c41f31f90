"""A fault-tolerant trainer plugin for Megatron and DeepSpeed: a GPU dies, the job does not.

    from ntp_plugin import elastic_job, tensor_parallel_job     # an ordinary PyTorch loop, under `ntp run`
    from ntp_plugin.megatron import enable                      # a Megatron script, before it imports `pretrain`
    from ntp_plugin.deepspeed import enable                     # a DeepSpeed script, before it makes a process group
    from ntp_plugin.planning import Job, Model, Parallel, plan  # what would happen if these GPUs were lost
    from ntp_plugin.telemetry import read_run                   # what happened in a run
    from ntp_plugin.testing import Ranks, kill                  # a test of your own loop, with faults
    from ntp_plugin.errors import NtpError                      # the base of all errors of the plugin

The public names are those in `__all__` of this package and of `ntp_plugin.errors`, `.megatron`, `.deepspeed`,
`.planning`, `.telemetry` and `.testing`. A public name is renamed, removed or given another meaning only in a new minor
version (0.2, 0.3, ...; from 1.0 on only in a new major version), and CHANGELOG.md says so. Everything else is private,
with or without an underscore, and may change in any version.

Importing this package does nothing: no torch, no handlers, no process groups, no threads. Each name is imported when it
is first used.

Read next: `plain/job.py` for an ordinary PyTorch loop, or `launch/`, which does the work of `ntp run`.
"""

from typing import TYPE_CHECKING

from ntp_plugin.lazy_exports import lazy_exports

__version__ = "0.1.0"

__all__ = [
    "BuildModel",
    "ColumnParallel",
    "ElasticJob",
    "LossOfModel",
    "LossOfSamples",
    "NtpError",
    "RowParallel",
    "Samples",
    "TensorParallelGroup",
    "__version__",
    "elastic_job",
    "plan",
    "read_run",
    "tensor_parallel_job",
]

if TYPE_CHECKING:
    from ntp_plugin.errors import NtpError
    from ntp_plugin.plain.job import BuildModel, ElasticJob, LossOfModel, elastic_job, tensor_parallel_job
    from ntp_plugin.plain.parallel_layers import ColumnParallel, RowParallel, TensorParallelGroup
    from ntp_plugin.plain.voted_step import LossOfSamples, Samples
    from ntp_plugin.planning.job_plan import plan
    from ntp_plugin.telemetry.record import read_run
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "ntp_plugin.errors": ("NtpError",),
            "ntp_plugin.plain.job": (
                "BuildModel",
                "ElasticJob",
                "LossOfModel",
                "elastic_job",
                "tensor_parallel_job",
            ),
            "ntp_plugin.plain.parallel_layers": ("ColumnParallel", "RowParallel", "TensorParallelGroup"),
            "ntp_plugin.plain.voted_step": ("LossOfSamples", "Samples"),
            "ntp_plugin.planning.job_plan": ("plan",),
            "ntp_plugin.telemetry.record": ("read_run",),
        },
    )
