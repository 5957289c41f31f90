"""`ntp_plugin.megatron.check` on the installed Megatron, in a process of its own: it changes torch."""

import json
import os
import subprocess
import sys

import pytest

PROBE = """
import json
from ntp_plugin.errors import ConfigError
from ntp_plugin.megatron import check

MODEL = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "8", "--attention-dropout", "0",
         "--hidden-dropout", "0"]

def flags(*more):
    return [option.flag for option in check([*MODEL, *more])]

try:
    check([*MODEL, "--num-layers", "two", "--ntp-enable"])
except ConfigError as error:
    refused = str(error)
(tracker,) = check([*MODEL, "--te-rng-tracker", "--ntp-enable"])
print(json.dumps({
    "accepted": flags("--ntp-enable"),
    "of a script": flags("--ntp-enable", "--my-own-flag", "7"),
    "off": flags("--te-rng-tracker"),
    "several": flags("--te-rng-tracker", "--use-torch-fsdp2", "--tensor-model-parallel-size", "3", "--ntp-enable"),
    "masks": flags("--hidden-dropout", "0.1", "--ntp-enable", "--ntp-dropout", "framework"),
    "fix": tracker.fix,
    "refused": refused,
}))
"""


@pytest.mark.short
def test_all_unsupported_options_are_found_without_a_model():
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROBE], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["accepted"] == found["of a script"] == found["off"] == []
    assert found["several"] == ["--use-torch-fsdp2", "--te-rng-tracker", "--num-query-groups"]
    assert found["masks"] == ["--hidden-dropout"]
    assert "--te-rng-tracker" in found["fix"]
    assert "invalid int value: 'two'" in found["refused"]
