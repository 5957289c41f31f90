"""Small scenarios that tests share."""

from ntp_plugin.config import schema
from ntp_plugin.simulator.scenario import Scenario, Simulation

SMALL = {
    "machine": "h100-nvl8",
    "parallel": {"tp": 8, "pp": 2, "dp": 8},
    "model": {"layers": 16, "hidden": 4096, "heads": 32, "ffn": 16384, "vocab": 32000, "gated": False},
    "batch": {"global_batch": 128},
    "days": 20,
    "failures": {"factor": 20.0},
}
PAPER = {
    "machine": "b200-nvl32",
    "parallel": {"tp": 32, "pp": 8, "dp": 128},
    "model": {
        **{"layers": 100, "hidden": 20480, "heads": 128, "ffn": 81920, "vocab": 128256, "seq": 16384},
        "gated": False,
    },
    "batch": {"global_batch": 1024},
    "state": {"distributed_optimizer": True},
    "packed": True,
    "days": 30,
}


def scenario(base=SMALL, **changed):
    keys = dict(base)
    for name, value in changed.items():
        keys[name] = {**base.get(name, {}), **value} if isinstance(value, dict) else value
    return Scenario(asked=schema.read(Simulation, keys, where=""))
