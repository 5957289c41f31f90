"""Replicas of an ordinary PyTorch loop are compared: a flipped bit or a lost number is found and named."""

import contextlib
import dataclasses
import io
import os
import re

import pytest
import torch

from ntp_plugin.plain import job as plain
from ntp_plugin.plain.parallel_layers import TensorParallelMLP
from ntp_plugin.testing.ranks import Ranks
from tests.ranks.plain_job import loss_of

STEPS, LONG_S = 60, 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spoilt:
    """A job in which one weight of slot 1 is corrupted between two steps."""

    after: int
    how: str
    tp: int = 1
    keys: tuple[tuple[str, object], ...] = ()

    def __call__(self, rank):
        """Its exit code, output, losses, weights and last members."""
        os.environ |= rank.environment()
        torch.manual_seed(0)
        output, losses, job = io.StringIO(), [], None
        try:
            with contextlib.redirect_stderr(output), self._begun() as job:
                while job.steps_done < STEPS:
                    if job.steps_done == self.after and rank.slot == 1:
                        self._spoil(next(iter(job._trainer.model.parameters())).data.view(-1))
                    losses.append(job.step())
        except SystemExit as end:
            return end.code, output.getvalue(), losses, None, None
        weights = [parameter.detach().clone() for parameter in job._trainer.model.parameters()]
        return 0, output.getvalue(), losses, weights, job.members

    def _begun(self):
        keys = dict(self.keys)
        if self.tp == 1:
            model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
            return plain.elastic_job(model, optimizer, loss_of(model), per_rank=4, **keys)

        def build(group):
            model = TensorParallelMLP(8, 16, 32, 1, group).double()
            return model, torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)

        return plain.tensor_parallel_job(
            build, lambda model, *of: loss_of(model)(*of), tp=self.tp, per_replica=4, **keys
        )

    def _spoil(self, values):
        if self.how == "nan":
            values[0] = torch.nan
        elif self.how == "flip":
            values[:1].view(torch.uint8)[4] ^= 1  # of a double; the last bit is soon rounded away, with its fault


def played(spoilt, ranks, but=()):
    with Ranks(ranks, spoilt) as running:
        return running.wait(LONG_S, but=but)


@pytest.mark.parametrize(("tp", "ranks"), [(1, 3), (2, 4)])
@pytest.mark.parametrize("after", [5, STEPS - 1])
def test_a_flipped_bit_in_a_job_of_60_steps_is_found(tp, ranks, after):
    """The same holds before the last step: replicas are compared before the job ends. How often they are before depends
    on how long a step takes."""
    outcomes = played(Spoilt(after=after, how="flip", tp=tp), ranks)
    for code, output, *_ in outcomes.values():
        assert code == 7, output
        named = r"weight \(weight\) in r1\.s0\.t0 is not what the other"
        if tp == 2:
            named = r"of TP slot 1 \(weight\) differs between 2 replicas after step \d+, in one of r0.s0.t1, r1.s0.t1"
        assert re.search(named, output), output


def test_comparison_can_be_switched_off():
    outcomes = played(Spoilt(after=5, how="flip", keys=(("watch_steps", 0),)), 2)
    assert [code for code, *_ in outcomes.values()] == [0, 0]


@pytest.mark.parametrize(("tp", "ranks", "slot"), [(1, 2, "r1.s0.t0"), (2, 4, "r0.s0.t1")])
def test_a_weight_that_is_not_finite_is_named_with_two_replicas(tp, ranks, slot):
    """Before it has come to the others by the gradients."""
    outcomes = played(Spoilt(after=30, how="nan", tp=tp), ranks)
    for code, output, *_ in outcomes.values():
        assert code == 7, output
        assert f"in {slot} is not finite after step 30, and in other replicas it is" in output


def test_the_other_replicas_continue_when_the_job_heals():
    calm = played(Spoilt(after=-1, how=""), 2)
    outcomes = played(Spoilt(after=30, how="nan", keys=(("on_sdc", "heal"),)), 2)
    code, output, *_ = outcomes[1]
    assert code == 7 and "is not finite after step 30" in output
    code, output, losses, weights, members = outcomes[0]
    assert (code, members) == (0, (0,)), output
    torch.testing.assert_close(losses, calm[0][2], rtol=1e-10, atol=0.0)
    torch.testing.assert_close(weights, calm[0][3], rtol=1e-10, atol=0.0)


def test_a_script_that_diverges_by_itself_continues():
    """All replicas are equal: the fault is the script's."""
    outcomes = played(Diverging(after=30, how="nan"), 2)
    for code, output, losses, *_ in outcomes.values():
        assert code == 0, output
        assert len(losses) == STEPS and losses[-1] != losses[-1]


class Diverging(Spoilt):
    """Both slots lose the same number."""

    def __call__(self, rank):
        spoil, taken = self._spoil, plain.ElasticJob.step

        def step(job):
            if job.steps_done == self.after and rank.slot == 0:
                spoil(next(iter(job._trainer.model.parameters())).data.view(-1))
            return taken(job)

        plain.ElasticJob.step = step
        return super().__call__(rank)
