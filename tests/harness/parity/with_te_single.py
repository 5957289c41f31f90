"""As `with_te.py`, in float32 as on a GPU."""

from ntp_plugin.megatron import cpu_emulation

cpu_emulation.install(cpu_emulation.ON, ["--transformer-impl", "transformer_engine"])

import megatron.training.training  # noqa: E402, F401  (not before the package is there)
