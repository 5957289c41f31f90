"""Folders, links and files that another user of the host plants beside the runs are never taken for ours."""

import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import torch

from ntp_plugin.cli import copies as cli_copies
from ntp_plugin.cli import export as cli_export
from ntp_plugin.cli import run as cli_run
from ntp_plugin.cli.main import main
from ntp_plugin.copies.manifest import Version
from ntp_plugin.copies.replicator import Part, Replicator, Snapshot
from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.copies.store import Store
from ntp_plugin.errors import ConfigError
from ntp_plugin.launch import run_folder
from ntp_plugin.launch.records import newest_record
from ntp_plugin.launch.run_folder import COPIES, RunFolder
from ntp_plugin.launch.started_by import StartedBy
from ntp_plugin.private_folders import is_private
from tests.unit.test_cli_status import BEGAN, write_events

NOBODY = 65534
LATER = 3600

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a while")


@pytest.fixture
def shared(monkeypatch):
    """A folder like /dev/shm and /tmp: all users may create files there, and none may remove those of others."""
    folder = Path(tempfile.mkdtemp(prefix="ntp-shared-", dir="/tmp"))
    folder.chmod(0o1777)
    for module in (cli_copies, cli_export, cli_run, run_folder):
        monkeypatch.setattr(module, "shared_memory", lambda: folder)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("COLUMNS", "250")
    yield folder
    shutil.rmtree(folder)


def as_nobody(script):
    subprocess.run(["/bin/sh", "-euc", script], user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", check=True)


def a_dead_run(shared):
    """Create the copies of a dead job of ours; returns their folder."""
    run = RunFolder(COPIES, shared)
    tensor_slice = TensorSlice(tensor="w", shape=(4, 5), dim=0, ranges=((0, 4),), start=0, stop=20)
    part = Part(tensor_slice=tensor_slice, values={"main": torch.arange(20.0)}, numbers={})
    version, extras = Version(step=7, epoch=2), {"framework": "megatron"}
    replicator = Replicator(Store(run.path / "host-0"), run="ntp/job", secret="", slot=3, trouble=pytest.fail)
    replicator.begin(Snapshot(version=version, holders=(3,), parts=[part], extras=extras))
    replicator.close()
    StartedBy(words=("python", "-u", "train.py"), folder=shared, workers=1, hosts=1).write(run.path)
    run.leave()
    return run.path


@pytest.fixture
def planted(shared):
    """All that another user can put there, newer than whatever is ours; and what is ours."""
    own = a_dead_run(shared)
    kept = shared / "kept-elsewhere"
    shutil.copytree(own, kept)
    proof = shared / "executed"
    forged = json.dumps({"words": ["/bin/sh", "-c", f"touch {proof}"], "folder": "/tmp", "workers": 1, "hosts": 1})
    as_nobody(f"""
        umask 0
        cd {shlex.quote(str(shared))}
        for mode in 0700 0755 0777; do
            mkdir -m $mode {COPIES}$mode; mkdir {COPIES}$mode/host-0
            touch {COPIES}$mode/owner {COPIES}$mode/host-0/near-0-e0-0 {COPIES}$mode/host-0/near-0-e0-0.json
            echo {shlex.quote(forged)} > {COPIES}$mode/started-by.json
            mkdir -m $mode ntp-record-$mode ntp-run-$mode
            echo '{{"at": 1}}' > ntp-record-$mode/events.jsonl
            touch -d '+1 hour' {COPIES}$mode ntp-record-$mode ntp-record-$mode/events.jsonl
        done
        ln -s {shlex.quote(str(kept))} {COPIES}link
        ln -s /nowhere {COPIES}dangling
        ln -s {COPIES}loop {COPIES}loop
        mkfifo {COPIES}fifo
        touch {COPIES}file
        touch -h -d '+1 hour' {COPIES}link
    """)
    return own, proof, {path.name for path in shared.iterdir()}


def test_planted_folders_are_neither_listed_nor_verified_nor_removed(shared, planted, capsys):
    own, _, there = planted
    for what in ("list", "verify"):
        assert main(["copies", what]) == 0
        output = capsys.readouterr().out
        assert str(own) in output
        assert [name for name in there - {own.name} if name in output] == []
    assert main(["copies", "clean"]) == 0
    assert {path.name for path in shared.iterdir()} == there - {own.name}


def test_an_export_takes_the_newest_of_ours_and_executes_no_command_of_a_file(shared, planted, capsys):
    own, proof, _ = planted
    assert main(["copies", "export", "latest", "--to", str(shared / "out"), "--dry-run", "--", "train.py"]) == 0
    assert f"of {own} would be written" in capsys.readouterr().out
    assert main(["copies", "export", "latest", "--to", str(shared / "out")]) == 2
    assert "the command of the job is missing" in capsys.readouterr().err
    assert not proof.exists()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("0700", f"belongs to uid {NOBODY}, and this is uid 0"),
        ("0777", f"belongs to uid {NOBODY}, and this is uid 0"),
        ("link", "is a symbolic link"),
        ("file", "cannot be opened as a folder"),
    ],
)
def test_a_planted_folder_given_by_name_is_refused_in_one_line(shared, planted, name, why, capsys):
    folder, (_, proof, there) = str(shared / f"{COPIES}{name}"), planted
    for words in (["list"], ["verify"], ["clean"]):
        assert main(["copies", *words, folder]) == 2
        output = capsys.readouterr().err
        assert (output.count("\n"), why in output) == (1, True), output
    if name != "file":
        assert main(["copies", "export", folder, "--to", str(shared / "out"), "--", "train.py"]) == 2
        assert why in capsys.readouterr().err
    with pytest.raises(ConfigError, match=why):
        cli_run._resumed(folder)
    assert {path.name for path in shared.iterdir()} == there
    assert not proof.exists()


def test_a_job_is_resumed_from_the_newest_of_ours(shared, planted):
    own, _, _ = planted
    assert cli_run._resumed("latest") == own


def test_without_an_own_run_nothing_is_resumed(shared, planted, capsys):
    own, proof, _ = planted
    shutil.rmtree(own)
    assert main(["copies", "list"]) == 0
    assert "no copies on this host" in capsys.readouterr().out
    assert main(["copies", "export", "latest", "--to", str(shared / "out"), "--", "train.py"]) == 2
    assert "of this host: none" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="of this host: none"):
        cli_run._resumed("latest")
    assert not proof.exists()


def test_a_new_run_leaves_folders_of_other_users(shared, planted):
    own, _, there = planted
    run = RunFolder(COPIES, shared)
    assert {path.name for path in shared.iterdir()} == (there - {own.name}) | {run.path.name}
    run.remove()


def test_status_and_report_take_the_newest_record_of_ours(shared, planted, capsys):
    with pytest.raises(ConfigError, match="there is no record of a run"):
        newest_record()
    record = RunFolder("ntp-record-", shared)
    write_events(record.path, BEGAN)
    os.utime(record.path / "events.jsonl", (time.time() - LATER,) * 2)
    assert newest_record() == record.path
    assert main(["status", "--json"]) == 0
    assert '"tp": 2' in capsys.readouterr().out
    record.remove()


def test_an_own_folder_writable_by_others_is_not_used(shared):
    folder = shared / f"{COPIES}open"
    for mode, private in ((0o700, True), (0o500, True), (0o710, False), (0o701, False), (0o777, False)):
        folder.mkdir(exist_ok=True)
        folder.chmod(mode)
        assert is_private(folder) == private, oct(mode)


def test_planted_folders_are_visible(shared, planted):
    """A control: without the check these would be taken, being newer."""
    own, _, _ = planted
    newest = max(shared.glob(f"{COPIES}*"), key=lambda path: path.lstat().st_mtime)
    assert newest != own
