"""`ntp copies export` of a living and of a dead DeepSpeed job equals, bit for bit, the checkpoint that DeepSpeed writes
after that step."""

import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from tests.deepspeed.test_recipe import ENVIRONMENT, RECIPES, output_until, pids_in, start, with_block

SAVING = """
import runpy, sys
import deepspeed
step = deepspeed.DeepSpeedEngine.step
saved = []

def stepped(engine, *args, **kwargs):
    step(engine, *args, **kwargs)
    if engine.global_steps in {steps} and engine.global_steps not in saved:
        saved.append(engine.global_steps)
        engine.save_checkpoint({folder!r})
        if len(saved) == len({steps}):
            sys.exit(0)

deepspeed.DeepSpeedEngine.step = stepped
runpy.run_path({train!r}, run_name="__main__")
"""


def exporting(to, script):
    words = ["-m", "ntp_plugin.cli.main", "copies", "export", "latest", "--to", str(to), "--", *script]
    return subprocess.run(
        [sys.executable, *words], env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False
    )


def export(to, script):
    done = exporting(to, script)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"the checkpoint is in {to}" in done.stdout
    return int((to / "latest").read_text().removeprefix("global_step"))


def without_us(folder, words, steps):
    """DeepSpeed alone, which saves after these steps."""
    script = folder / "saving.py"
    script.write_text(SAVING.format(steps=steps, folder=str(folder / "own"), train=str(RECIPES / "train.py")))
    process = start(*(word.replace(str(RECIPES / "train.py"), str(script)) for word in words), PAUSE_S="0")
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output[-3000:]
    return folder / "own"


def tensors_in(value, name=""):
    """Name -> what a checkpoint's file holds."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return {key: tensor for at, one in pairs for key, tensor in tensors_in(one, f"{name}/{at}").items()}


def assert_equal(mine, own):
    assert sorted(path.name for path in mine.iterdir()) == sorted(path.name for path in own.iterdir())
    for path in mine.glob("*.pt"):
        found, wanted = (tensors_in(torch.load(one, weights_only=False)) for one in (path, own / path.name))
        assert wanted and found.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == [], path.name


@pytest.mark.parametrize(("config", "stage"), [("ds_config.json", None), ("ds_config_tp.json", 1)])
def test_exported_copies_equal_what_deepspeed_would_have_saved(tmp_path, config, stage):
    words = ["--nproc-per-node=4", str(RECIPES / "train.py"), "--epochs=20", "--deepspeed_config"]
    watched = ["--ntp-copies-keep=0", *words, with_block(tmp_path, {"enabled": True}, of=config, stage=stage)]
    process = start(*watched, PAUSE_S="1")
    pids = pids_in(output_until(process, r"step 8:"))
    living = export(tmp_path / "living", watched[2:])
    for line in process.stdout:  # it has continued, and does
        if (match := re.match(r"step (\d+):", line)) and int(match[1]) > living:
            break
    for pid in (process.pid, *pids.values()):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    dead = export(tmp_path / "dead", watched[2:])
    off = exporting(tmp_path / "off", [*words[1:], with_block(tmp_path, {"enabled": False}, of=config, stage=stage)])
    assert off.returncode == 2, off.stdout[-3000:] + off.stderr[-3000:]
    assert "the configuration does not enable ntp" in off.stdout + off.stderr
    assert not (tmp_path / "off").exists(), "nothing was trained or written"
    assert dead > living >= 7
    own = without_us(
        tmp_path, [*words, with_block(tmp_path, {"enabled": False}, of=config, stage=stage)], [living, dead]
    )
    for folder, step in (("living", living), ("dead", dead)):
        assert_equal(tmp_path / folder / f"global_step{step}", own / f"global_step{step}")
