"""Imported by the fork server for jobs with TransformerEngine's layers, which run in float64: what Megatron finds of
the package and its precisions when it is imported stays for the life of the process."""

from ntp_plugin.megatron import cpu_emulation

cpu_emulation.install(cpu_emulation.FLOAT64, ["--transformer-impl", "transformer_engine"])

import megatron.training.training  # noqa: E402, F401  (not before the package is there)
