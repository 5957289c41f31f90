"""What `ntp copies export` refuses, each in one line."""

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
    """Leaves what a dead run would have left."""
    monkeypatch.setattr("ntp_plugin.cli.export.shared_memory", lambda: tmp_path)

    def leave(*, framework="megatron", here=(3,), holders=(3,), recorded=True, name="host-0"):
        run = RunFolder(COPIES, tmp_path)
        piece = TensorSlice(tensor="w", shape=(4, 5), dim=0, ranges=((0, 4),), start=0, stop=20)
        for slot in here:
            replicator = Replicator(Store(run.path / name), run="ntp/job", secret="", slot=slot, trouble=pytest.fail)
            part = Part(piece=piece, values={"main": torch.arange(20.0)}, numbers={})
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
    said = capsys.readouterr()
    assert said.err.count("\n") <= 1, said.err
    return code, said.err or said.out


def test_what_would_be_done_is_told(left, tmp_path, capsys):
    folder = left()
    script = ("train.py", "--flag", "two words")
    code, told = export(capsys, "latest", "--to", tmp_path / "out", "--dry-run", "--", *script)
    assert code == 0
    assert f"step 7 as laid out in epoch 2 of {folder} would go into {tmp_path}/out, by 2 processes" in told
    assert f"{sys.executable} -u train.py --flag 'two words'" in told
    assert not (tmp_path / "out").exists()


def test_the_command_is_for_its_owner_only_and_comes_back(left):
    folder = left()
    (file,) = folder.glob("*.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert StartedBy.read(folder).words == ("python", "-u", "train.py", "--lr", "1")
    assert set(json.loads(file.read_text())) == {"words", "folder", "workers", "hosts"}, "no environment"


def test_a_command_that_stands_in_a_file_is_shown_and_not_executed(left, tmp_path, capsys):
    """Whoever can write a file that this command reads shall not run anything by that."""
    folder, to = left(), tmp_path / "out"
    words = ("sh", "-c", f"touch {tmp_path}/executed", "--title", "\x1b]0;owned\x07")
    StartedBy(words=words, folder=tmp_path, workers=2, hosts=1).write(folder)
    code, told = export(capsys, "latest", "--to", to)
    assert code == 2
    assert f"cd {tmp_path} && ntp copies export latest --to {to} -- sh -c 'touch {tmp_path}/executed'" in told
    assert "\x1b" not in told
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
    code, told = export(capsys, "latest", "--to", f"{left()}.out", "--dry-run", "--", *given)
    assert (code, told.splitlines()[-1]) == (0, words)


def test_where_it_cannot_go(left, tmp_path, capsys):
    folder = left()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/something").write_text("")
    for to, why in (
        (tmp_path / "full", "is not empty"),
        (tmp_path / "full/something", "is not a folder"),
        (tmp_path / "full/something/in", "cannot be written to"),
        ("/proc/nobody/may", "cannot be written to"),
        (folder / "inside", "is among the copies of the run"),
        (folder, "is among the copies of the run"),
    ):
        code, told = export(capsys, folder, "--to", to, *COMMAND)
        assert (code, why in told) == (2, True), (to, told)
    assert {path.name for path in tmp_path.iterdir()} == {"full", folder.name}


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({"recorded": False}, "does not say by which command"),
        ({"framework": "plain"}, "were made by plain, and it cannot start only to save"),
        ({"framework": ""}, "were made by something that does not say its name"),
        ({"holders": (2, 3, 5)}, "those of slots 2, 5"),
        ({"here": ()}, "has copies of 0 hosts"),
    ],
)
def test_copies_that_cannot_be_exported(left, made, why, tmp_path, capsys):
    code, told = export(capsys, left(**made), "--to", tmp_path / "out", *COMMAND)
    assert (code, why in told) == (2, True), told
    assert not (tmp_path / "out").exists()


def test_copies_of_another_host_than_the_first(left, tmp_path, capsys):
    code, told = export(capsys, left(name="host-3"), "--to", tmp_path / "out", "--dry-run", *COMMAND)
    assert code == 0, told


def test_words_that_make_no_sense(left, tmp_path, capsys):
    folder, to = left(), tmp_path / "out"
    for words, why in (
        ((tmp_path / "none", "--to", to), f"there are no copies of a run there. Way out: on this host: {folder}"),
        ((folder,), "--to"),
        ((folder, "--to", to, "--nproc-per-node", "0"), "argument --nproc-per-node: '0' is not a whole number from 1"),
        ((folder, "--to", to, "--", "ntp", "run", "train.py"), "leave out ntp run"),
        ((folder, "--to", to, "train.py"), "train.py is not a known word"),
        ((folder, "--to", to, "--form", "x"), "is not a known flag"),
    ):
        code, told = export(capsys, *words, *([] if "--" in words else COMMAND))
        assert (code, why in told) == (2, True), told


def test_a_script_that_cannot_start_leaves_nothing(left, tmp_path):
    """The folder is as it was: not there."""
    folder = left()
    words = [*NTP, "copies", "export", str(folder), "--to", str(tmp_path / "out"), "--nproc-per-node", "1"]
    words += ["--", sys.executable, "-u", str(tmp_path / "train.py")]  # another Python ends with a code of its own
    code, said = Command(words, tmp_path / "log").end()
    assert (code, "there is no checkpoint" in said) == (1, True), said
    assert not (tmp_path / "out").exists()
    assert any(folder.glob("*/*.json"))
