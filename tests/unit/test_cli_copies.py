"""`ntp copies` on a folder with copies in it."""

import os
import shutil

import pytest
import torch

from ntp_plugin.cli import copies
from ntp_plugin.cli.main import main
from ntp_plugin.copies.manifest import Version
from ntp_plugin.copies.parity import ParityStore
from ntp_plugin.copies.replicator import Part, Replicator, Snapshot
from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.copies.store import PARITY, CopyKey, Store
from ntp_plugin.launch.run_folder import COPIES, RunFolder
from tests.unit.copies_bytes import mapped
from tests.unit.test_copies_store import some_values, written


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("ntp_plugin.cli.copies.shared_memory", lambda: tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    run = RunFolder(COPIES, tmp_path)
    store = Store(run.path / "host-0")
    replicator = Replicator(store, run="ntp/job", secret="", slot=3, trouble=pytest.fail)
    tensor_slice = TensorSlice(tensor="w", shape=(4, 5), dim=0, ranges=((0, 4),), start=0, stop=20)
    part = Part(tensor_slice=tensor_slice, values={"main": torch.arange(20.0)}, numbers={})
    replicator.begin(Snapshot(version=Version(step=7, epoch=2), holders=(3, 5), parts=[part], extras={}))
    replicator.close()
    yield run, store
    run.leave() if run.path.exists() else None


def test_list_shows_the_versions_on_this_host(folder, capsys):
    assert main(["copies", "list"]) == 0
    output = capsys.readouterr().out
    assert all(word in output for word in ("ntp/job", "host-0", "7", "1 of 2", "(alive)"))


def test_verify_finds_a_changed_byte(folder, capsys):
    assert main(["copies", "verify"]) == 0
    assert "right" in capsys.readouterr().out
    (place, _), *_ = folder[1].found()
    mapped(folder[1], place)[5] ^= 1
    assert main(["copies", "verify", str(folder[0].path)]) == 1
    output = capsys.readouterr().out
    assert "1 WRONG" in output
    assert "host-0, near-3-e2-0: w (main) damaged" in output


def test_verify_finds_a_truncated_copy(folder, capsys):
    (place, _), *_ = folder[1].found()
    os.truncate(folder[1].folder / str(place), 10)
    assert main(["copies", "verify"]) == 1
    assert "near-3-e2-0: incomplete" in capsys.readouterr().out


def test_clean_keeps_copies_of_a_living_run(folder, capsys):
    run, _ = folder
    assert main(["copies", "clean"]) == 0
    assert run.path.exists()
    assert main(["copies", "clean", str(run.path)]) == 2
    assert "belongs to a running job" in capsys.readouterr().err
    run.leave()
    assert main(["copies", "clean"]) == 0
    assert not run.path.exists()


def test_a_foreign_folder_is_refused(tmp_path, folder, capsys):
    assert main(["copies", "clean", str(tmp_path / "none")]) == 2
    (tmp_path / "other").mkdir(mode=0o700)
    assert main(["copies", "clean", str(tmp_path / "other")]) == 2
    assert (tmp_path / "other").exists()
    assert "is no folder of a run" in capsys.readouterr().err
    assert folder[0].path.exists()


def test_a_parity_is_listed_with_its_members_and_verified(folder, capsys):
    run, store = folder
    parities = ParityStore(store)
    for slot in (3, 5):
        memory, manifest = written(some_values(slot), step=7, slot=slot, run="ntp/job")
        place = CopyKey(kind=PARITY, slot=3, epoch=2, number=0)
        batches = [(batch, memory[batch.begin : batch.end]) for batch in manifest.layout.batches]
        parities.take(place, (3, 5), manifest, batches)
    assert main(["copies", "list"]) == 0
    output = capsys.readouterr().out
    assert "1 of 2" in output, "a parity is no part"
    assert "3+5" in output
    assert main(["copies", "verify"]) == 0
    capsys.readouterr()
    mapped(store, place)[9] ^= 2
    assert main(["copies", "verify", str(run.path)]) == 1
    assert "host-0, parity-3-e2-0: parity (xor) damaged" in capsys.readouterr().out


def test_a_run_that_begins_or_ends_meanwhile_is_skipped(folder, tmp_path, capsys):
    """One has made its folder, and not its lock yet; one has removed its lock, and not its copies yet."""
    (tmp_path / f"{COPIES}begins").mkdir(mode=0o700)
    ends = tmp_path / f"{COPIES}ends"
    shutil.copytree(folder[0].path, ends)
    (ends / "owner").unlink()
    for what in ("list", "verify"):
        assert main(["copies", what]) == 0
        output = capsys.readouterr().out
        assert str(folder[0].path) in output
        assert str(ends) not in output
    assert main(["copies", "list", str(ends)]) == 2
    assert "is no folder of a run" in capsys.readouterr().err


def test_a_run_removed_while_it_is_read_is_skipped(folder, tmp_path, monkeypatch, capsys):

    def removed(path):
        shutil.rmtree(path, ignore_errors=True)
        return True

    monkeypatch.setattr(copies, "_lives", removed)
    assert main(["copies", "list"]) == 0
    assert "no copies on this host" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_reading_creates_no_folder(tmp_path):
    """A folder that a run has just removed would reappear, without a lock, and for ever."""
    assert list(Store(tmp_path / "run/host-0", makes=False).found()) == []
    assert list(tmp_path.iterdir()) == []
