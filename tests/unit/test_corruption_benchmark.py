"""The benchmark of corruption on one injection of each kind, and its result if digests are not compared."""

import random

import pytest
import torch

from benchmarks.corruption.__main__ import CONTROLS, negative_controls, trial
from benchmarks.corruption.injections import KINDS, PAGES
from benchmarks.corruption.parities import PARITY_KINDS, parity_trial
from benchmarks.corruption.state import PAGED, TENSORS, Job, dealt, elements
from ntp_plugin.copies import runs


@pytest.fixture(scope="module")
def job():
    with Job(random.Random(1)) as made:
        yield made


@pytest.fixture(scope="module")
def job_of_parities():
    with Job(random.Random(2), parities=True) as made:
        yield made


@pytest.mark.parametrize("all_copies", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_injected_damage_is_found_and_the_files_are_restored(job, kind, all_copies):
    for _ in range(2):
        seen = trial(job, kind, random.Random(f"{kind} {all_copies}"), all_copies=all_copies)
        assert seen.found, seen.seen
        assert seen.right_source, seen.seen


@pytest.mark.parametrize("kind", PARITY_KINDS)
def test_damage_under_a_shared_parity_is_found(job_of_parities, kind):
    for number in range(4):
        seen = parity_trial(job_of_parities, kind, random.Random(f"{kind} {number}"))
        assert seen.found, seen.seen
        assert seen.right_source, seen.seen


def test_the_benchmark_detects_unverified_parity_output(job_of_parities, monkeypatch):
    monkeypatch.setattr("ntp_plugin.copies.parity.wrong_in", lambda *_, **__: [])
    seen = parity_trial(job_of_parities, "stale parity", random.Random(5))
    assert not seen.found


def test_the_benchmark_detects_digests_that_ignore_pages(monkeypatch):
    runs.keys_in_page(torch.device("cpu"))  # the places in a page still are
    monkeypatch.setattr(runs, "odd_numbers", torch.ones_like)
    with Job(random.Random(4)) as job:
        assert not any(trial(job, PAGES, random.Random(seed), all_copies=False).found for seed in range(4))
        assert trial(job, "wrong place", random.Random(4), all_copies=False).found


def test_every_slot_has_parts_of_several_pages(job):
    for tensor in (tensor for tensor in TENSORS if tensor.name in PAGED):
        slices = [
            tensor_slice for held in job.layout.values() for tensor_slice in held if tensor_slice.tensor == tensor.name
        ]
        pages = [set((elements(tensor_slice) // tensor_slice.runs.page).tolist()) for tensor_slice in slices]
        assert len(set.union(*pages)) > 3
        assert all(len(of_one) > 1 for of_one in pages)


@pytest.mark.parametrize("evenly", [False, True])
def test_every_element_is_dealt_once_and_replicated_ones_to_all(evenly):
    layout = dealt(range(4), random.Random(2), evenly=evenly)
    for number, tensor in enumerate(TENSORS):
        places = torch.cat([elements(slices[number]) for slices in layout.values()])
        counts = torch.bincount(places, minlength=tensor.size)
        assert counts.tolist() == [4 if tensor.cut == "no" else 1] * tensor.size


def test_the_benchmark_detects_uncompared_digests():
    for control in negative_controls(random.Random(3)):
        assert control["noticed"], control
        assert control["injected"] == len(CONTROLS)
