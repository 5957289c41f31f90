"""A script that builds its DeepSpeed configuration itself, with the plugin enabled by `ntp run`."""

import re
import subprocess
import sys

import pytest

from ntp_plugin.deepspeed.settings import read_policy
from ntp_plugin.errors import ConfigError
from tests.deepspeed.test_recipe import start

OWN_CONFIGURATION = """
import os, signal
import torch
torch.distributed.init_process_group("gloo")     # before it imports DeepSpeed
import deepspeed
model = torch.nn.Linear(2, 1)
data = torch.utils.data.TensorDataset(torch.arange(128.0).reshape(64, 2) / 128, torch.ones(64, 1))
config = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
engine, _, loader, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), training_data=data, config=config
)
for inputs, wanted in loader:
    if os.environ["RANK"] == "1" and engine.global_steps == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    engine.backward(torch.nn.functional.mse_loss(engine(inputs), wanted))
    engine.step()
print(f"done: step {engine.global_steps}, {torch.distributed.get_world_size()} ranks")
"""


def test_a_script_that_builds_its_configuration_itself(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(OWN_CONFIGURATION)
    process = start("--nproc-per-node=2", "--ntp-deepspeed=on", str(script))
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output[-3000:]
    assert re.search(r"done: step 16, 1 ranks", output), output[-3000:]


def test_the_block_comes_from_one_place():
    given = {"NTP_DEEPSPEED": '{"enabled": true, "watch_steps": 3}'}
    policy = read_policy({}, given)
    assert (policy.enabled, policy.watch_steps) == (True, 3)
    assert not read_policy({}, {}).enabled
    with pytest.raises(ConfigError, match="--ntp-deepspeed is given, and the DeepSpeed configuration has a block"):
        read_policy({"ntp": {"enabled": True}}, given)


@pytest.mark.parametrize(
    ("content", "says"), [('{"watch_step": 3}', 'did you mean "watch_steps"'), (None, "name it .toml or .json")]
)
def test_a_wrong_file_is_one_line(tmp_path, content, says):
    file = tmp_path / ("block.json" if content else "block")
    file.write_text(content or "")
    words = ["run", "--standalone", f"--ntp-deepspeed={file}", "--nproc-per-node=1", __file__]
    done = subprocess.run(
        [sys.executable, "-m", "ntp_plugin.cli.main", *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("ntp: --ntp-deepspeed: ")
    assert says in done.stderr
