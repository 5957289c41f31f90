"""What a worker reports of an exception that ends it, and when that is the job's error."""

import dataclasses
import itertools
import json
import os

import pytest
import torch
import torch.distributed as dist

from ntp_plugin.errors import PeerLost
from ntp_plugin.recovery.script_failure import (
    FOLDER,
    ON_ERROR,
    ScriptFailure,
    ends_the_job,
    failure_of,
    read_failure,
    reported,
)

OWN = ScriptFailure(kind="ValueError", message="wrong", place="train.py:3 in train", traceback="...")
OF_A_FAULT = dataclasses.replace(OWN, by_a_fault=True)


def raised(error, *, cause=None):
    """Once it has been raised."""
    with pytest.raises(type(error)) as caught:
        raise error from cause
    return caught.value


def decision(failure=OWN, **changes):
    usual = {"on_error": "stop", "again": False, "is_member": True, "beside_a_loss": False, "others_are_done": False}
    return ends_the_job(failure, **usual | changes)


def test_an_error_of_a_member_that_no_loss_has_caused_ends_the_job():
    assert decision()


@pytest.mark.parametrize("changes", [{"is_member": False}, {"beside_a_loss": True}, {"on_error": "retry"}])
def test_a_repeated_error_ends_the_job(changes):
    assert not decision(**changes)
    assert decision(again=True, **changes)


def test_an_error_beside_a_loss_ends_the_job_when_the_others_are_done():
    """A rank that alone saves the model: no other rank would do it again, and the job would end well without one."""
    assert decision(beside_a_loss=True, others_are_done=True)
    assert not decision(on_error="retry", beside_a_loss=True, others_are_done=True)
    assert not decision(OF_A_FAULT, beside_a_loss=True, others_are_done=True)


def test_neither_evict_nor_an_injected_fault_ends_the_job():
    for again, is_member, beside_a_loss in itertools.product([False, True], repeat=3):
        changes = {"again": again, "is_member": is_member, "beside_a_loss": beside_a_loss}
        assert not decision(on_error="evict", **changes)
        assert not any(decision(OF_A_FAULT, on_error=on_error, **changes) for on_error in ON_ERROR)


FAULTS = [
    dist.DistBackendError("NCCL error: remote process exited"),
    dist.DistNetworkError("the connection is gone"),
    torch.AcceleratorError("an illegal instruction was encountered"),
    RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"),
    RuntimeError("CUDA error: uncorrectable ECC error encountered"),
]
OWN_ERRORS = [
    AttributeError("'Llama' object has no attribute 'config'"),
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("CUDA error: device-side assert triggered"),
    ConnectionResetError("of a socket of the script's"),
    MemoryError(),
]


@pytest.mark.parametrize("error", FAULTS, ids=str)
def test_an_error_of_a_collective_or_a_device_is_a_fault(error):
    assert failure_of(raised(error)).by_a_fault
    assert failure_of(raised(ValueError("no loss to log"), cause=error)).by_a_fault


@pytest.mark.parametrize("error", OWN_ERRORS, ids=repr)
def test_any_other_error_is_the_scripts_own(error):
    assert not failure_of(raised(error)).by_a_fault


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit(None), SystemExit(143), PeerLost("slot 1 is lost")])
def test_an_end_not_caused_by_the_script_is_not_reported(error):
    assert failure_of(raised(error)) is None


def test_an_error_raised_from_a_loss_is_not_reported():
    assert failure_of(raised(ValueError("no loss to log"), cause=PeerLost("slot 1 is lost"))) is None


def test_a_report_names_the_place_and_comes_to_the_supervisor(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with pytest.raises(SystemExit), reported():
        raise SystemExit(3)
    found = read_failure(tmp_path, os.getpid())
    assert (found.kind, found.message) == ("SystemExit", "exited with 3")
    assert found.place.startswith(f"{__file__}:")
    assert "raise SystemExit(3)" in found.traceback
    assert read_failure(tmp_path, 1) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"kind": "ValueError"}), "\0"])
def test_a_malformed_report_is_ignored(tmp_path, text):
    (tmp_path / "7.json").write_text(text)
    assert read_failure(tmp_path, 7) is None


def test_a_missing_folder_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path / "gone"))
    with pytest.raises(ValueError, match="wrong"), reported():
        raise ValueError("wrong")
