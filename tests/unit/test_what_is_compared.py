"""Which settings a joining rank may change, and when a mismatch is checked again."""

import types

import pytest
import torch

from ntp_plugin.config.sections import TrainingPolicy
from ntp_plugin.errors import Refused
from ntp_plugin.plain import fingerprints
from ntp_plugin.recovery import same_settings
from ntp_plugin.recovery.comparison_interval import AT_LEAST_EVERY
from ntp_plugin.recovery.fingerprint import Fingerprint, encode
from ntp_plugin.recovery.replica_comparison import ReplicaWatch


def groups_of(**options):
    parameter = torch.nn.Parameter(torch.zeros(2))
    return dict(fingerprints._optimizer(torch.optim.AdamW([parameter], **options)))


def test_a_joining_rank_may_have_loaded_another_point_of_the_schedule():
    assert groups_of(lr=0.1) == groups_of(lr=0.05, betas=(0.8, 0.9))
    assert groups_of(lr=0.1) != groups_of(lr=0.1, weight_decay=0.5)


def joining(sections, left):
    rank = types.SimpleNamespace(
        place=types.SimpleNamespace(joining=True, slot=1, incarnation="1/1@0"),
        shared_value_or_none=lambda name: left.get(name.removeprefix("fingerprint/")),
    )
    same_settings.require_same(rank, Fingerprint(sections=sections), leaves=False)


def test_data_that_the_job_had_not_opened_when_it_compared_are_no_difference():
    """Its script saved a checkpoint before it had a loader. All else must be known."""
    left = {"arguments": encode({"lr": "1"})}
    joining({"arguments": {"lr": "1"}, same_settings.DATA: {"length": "8"}}, left)
    with pytest.raises(Refused, match="model is known here alone"):
        joining({"arguments": {"lr": "1"}, "model": {"w": "2"}}, left)
    with pytest.raises(Refused, match="length"):
        joining({same_settings.DATA: {"length": "8"}}, left | {same_settings.DATA: encode({"length": "9"})})


def test_a_loss_that_is_not_finite_is_looked_at_again_later_in_the_same_epoch(monkeypatch):
    """At first all had diverged equally; a NaN in one replica may come a thousand steps later."""
    compared = []
    monkeypatch.setattr(ReplicaWatch, "_compare", lambda _, step: compared.append(step))
    rank = types.SimpleNamespace(groups=types.SimpleNamespace(epoch=0, slot=0), place=types.SimpleNamespace(slot=0))
    watch = ReplicaWatch(TrainingPolicy(), None, rank=rank, replicated_state=dict, distrust=None, event_writer=None)
    for step in (40, 41, 139, 140, 141):
        watch.not_finite(step)
    assert compared == [40, 40 + AT_LEAST_EVERY]
