"""The refusals of `ntp copies export`, each in one line."""

import json
import os
import stat
import sys
from pathlib import Path

import pytest
import torch

from ntp_plugin.cli.main import main
from ntp_plugin.copies.manifest import Version
from ntp_plugin.copies.replicator import Part, Replicator, Snapshot
from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.copies.store import Store
from ntp_plugin.launch.run_folder import COPIES, RunFolder
from ntp_plugin.launch.started_by import StartedBy
from tests.ranks.command import NTP, Command

COMMAND = ("--", "python", "train.py")


@pytest.fixture
def left(tmp_path, monkeypatch):
    """Create the copies of a dead run."""
    monkeypatch.setattr("ntp_plugin.cli.export.shared_memory", lambda: tmp_path)

    def leave(*, framework="megatron", here=(3,), holders=(3,), recorded=True, name="host-0"):
        run = RunFolder(COPIES, tmp_path)
        tensor_slice = TensorSlice(tensor="w", shape=(4, 5), dim=0, ranges=((0, 4),), start=0, stop=20)
        for slot in here:
            replicator = Replicator(Store(run.path / name), run="ntp/job", secret="", slot=slot, trouble=pytest.fail)
            part = Part(tensor_slice=tensor_slice, values={"main": torch.arange(20.0)}, numbers={})
            extras = {"framework": framework} if framework else {}
            version = Version(step=7, epoch=2)
            replicator.begin(Snapshot(version=version, holders=holders, parts=[part], extras=extras))
            replicator.close()
        if recorded:
            words = ("python", "-u", "train.py", "--lr", "1")
            StartedBy(words=words, folder=tmp_path, workers=2, hosts=1).write(run.path)
        run.leave()
        return run.path

    return leave


def export(capsys, *words):
    code = main(["copies", "export", *map(str, words)])
    captured = capsys.readouterr()
    assert captured.err.count("\n") <= 1, captured.err
    return code, captured.err or captured.out


def test_a_dry_run_prints_what_it_would_do(left, tmp_path, capsys):
    folder = left()
    script = ("train.py", "--flag", "two words")
    code, output = export(capsys, "latest", "--to", tmp_path / "out", "--dry-run", "--", *script)
    assert code == 0
    assert f"step 7 as laid out in epoch 2 of {folder} would be written to {tmp_path}/out by 2 processes" in output
    assert f"{sys.executable} -u train.py --flag 'two words'" in output
    assert not (tmp_path / "out").exists()


def test_the_stored_command_is_private_and_round_trips(left):
    folder = left()
    (file,) = folder.glob("*.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert StartedBy.read(folder).words == ("python", "-u", "train.py", "--lr", "1")
    assert set(json.loads(file.read_text())) == {"words", "folder", "workers", "hosts"}, "no environment"


def test_a_stored_command_is_shown_and_not_executed(left, tmp_path, capsys):
    """A file that this command reads must not make it run anything."""
    folder, to = left(), tmp_path / "out"
    words = ("sh", "-c", f"touch {tmp_path}/executed", "--title", "\x1b]0;owned\x07")
    StartedBy(words=words, folder=tmp_path, workers=2, hosts=1).write(folder)
    code, output = export(capsys, "latest", "--to", to)
    assert code == 2
    assert f"cd {tmp_path} && ntp copies export latest --to {to} -- sh -c 'touch {tmp_path}/executed'" in output
    assert "\x1b" not in output
    assert {path.name for path in tmp_path.iterdir()} == {folder.name}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["train.py", "--lr", "1"], f"{sys.executable} -u train.py --lr 1"),
        (["-m", "train", "--", "x"], f"{sys.executable} -u -m train -- x"),
        ([Path(sys.executable).name, "-X", "dev", "train.py"], f"{sys.executable} -X dev train.py"),
        (["./train.sh"], "./train.sh"),
    ],
)
def test_the_command_of_a_worker(left, given, words, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    code, output = export(capsys, "latest", "--to", f"{left()}.out", "--dry-run", "--", *given)
    assert (code, output.splitlines()[-1]) == (0, words)


def test_invalid_targets_are_refused(left, tmp_path, capsys):
    folder = left()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/something").write_text("")
    for to, why in (
        (tmp_path / "full", "is not empty"),
        (tmp_path / "full/something", "is not a folder"),
        (tmp_path / "full/something/in", "cannot be written to"),
        ("/proc/nobody/may", "cannot be written to"),
        (folder / "inside", "is inside the run's folder of copies"),
        (folder, "is inside the run's folder of copies"),
    ):
        code, output = export(capsys, folder, "--to", to, *COMMAND)
        assert (code, why in output) == (2, True), (to, output)
    assert {path.name for path in tmp_path.iterdir()} == {"full", folder.name}


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({"recorded": False}, "has no record of the command"),
        ({"framework": "plain"}, "were made by plain, which cannot start only to save"),
        ({"framework": ""}, "were made by an unnamed framework"),
        ({"holders": (2, 3, 5)}, "those of slots 2, 5"),
        ({"here": ()}, "has copies of 0 hosts"),
    ],
)
def test_copies_that_cannot_be_exported(left, made, why, tmp_path, capsys):
    code, output = export(capsys, left(**made), "--to", tmp_path / "out", *COMMAND)
    assert (code, why in output) == (2, True), output
    assert not (tmp_path / "out").exists()


def test_copies_of_another_host_than_the_first(left, tmp_path, capsys):
    code, output = export(capsys, left(name="host-3"), "--to", tmp_path / "out", "--dry-run", *COMMAND)
    assert code == 0, output


def test_invalid_arguments_are_refused(left, tmp_path, capsys):
    folder, to = left(), tmp_path / "out"
    for words, why in (
        ((tmp_path / "none", "--to", to), f"no copies of a run there. Fix: name a folder of this host: {folder}"),
        ((folder,), "--to"),
        ((folder, "--to", to, "--nproc-per-node", "0"), "argument --nproc-per-node: '0' is not a whole number from 1"),
        ((folder, "--to", to, "--", "ntp", "run", "train.py"), "leave out ntp run"),
        ((folder, "--to", to, "train.py"), "train.py is not a known word"),
        ((folder, "--to", to, "--form", "x"), "is not a known flag"),
    ):
        code, output = export(capsys, *words, *([] if "--" in words else COMMAND))
        assert (code, why in output) == (2, True), output


def test_a_script_that_cannot_start_leaves_nothing(left, tmp_path):
    """The folder is as it was: not there."""
    folder = left()
    words = [*NTP, "copies", "export", str(folder), "--to", str(tmp_path / "out"), "--nproc-per-node", "1"]
    words += ["--", sys.executable, "-u", str(tmp_path / "train.py")]  # another Python ends with a code of its own
    code, output = Command(words, tmp_path / "log").end()
    assert (code, "no checkpoint was written" in output) == (1, True), output
    assert not (tmp_path / "out").exists()
    assert any(folder.glob("*/*.json"))
