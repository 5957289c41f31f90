"""The loss of a replica that computes several nominal parts of each sequence."""

import pytest
import torch

from ntp_plugin.errors import Refused
from ntp_plugin.megatron.context_loss import by_nominal_parts


def sequences(positions=24, samples=2):
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(samples, positions, generator=generator, dtype=torch.float64)
    return values, (torch.rand(samples, positions, generator=generator) > 0.4).double()


def of_rank(values, place, degree):
    """What a replica has: a part from the beginning on, and one to the end."""
    chunks = values.chunk(2 * degree, dim=1)
    return torch.cat([chunks[place], chunks[2 * degree - 1 - place]], dim=1)


def mean(values, mask):
    return (values * mask).sum() / mask.sum().clamp(min=1)


def summed(mask, output):
    """The loss function of Megatron's scripts."""
    total = (output * mask).sum()
    return total, mask.sum().int(), {"lm loss": total.detach()}


@pytest.mark.parametrize(("degree", "cp"), [(1, 2), (1, 4), (2, 4), (3, 6)])
def test_the_loss_of_a_replica_is_the_mean_of_the_nominal_parts_that_it_has(degree, cp):
    values, mask = sequences()
    parts = cp // degree
    for place in range(degree):
        mine, counted = of_rank(values, place, degree).requires_grad_(), of_rank(mask, place, degree)
        step = by_nominal_parts(lambda mine=mine, counted=counted: (mine, lambda out: summed(counted, out)), parts)
        output, loss_func = step()
        total, tokens, reported = loss_func(output)
        nominal = [
            mean(of_rank(values, part, cp), of_rank(mask, part, cp))
            for part in range(place * parts, (place + 1) * parts)
        ]
        assert (total / tokens).item() == pytest.approx((sum(nominal) / parts).item(), rel=1e-14)
        assert reported["lm loss"].item() == (mine * counted).sum().item()
        (total / tokens).backward()
        assert bool((mine.grad[counted == 0] == 0).all())
        assert abs(float(mine.grad.sum()) - 1) < 1e-14, "each mean has the weight one part of the sequence has"


def test_a_part_without_tokens_that_count_adds_nothing():
    values, mask = sequences()
    mask[:, :3] = mask[:, -3:] = 0  # the first of four nominal parts
    _, loss_func = by_nominal_parts(lambda: (values, lambda out: summed(mask, out)), 4)()
    total, tokens, _ = loss_func(values)
    expected = sum(mean(of_rank(values, part, 4), of_rank(mask, part, 4)) for part in range(1, 4)) / 4
    assert float(total / tokens) == pytest.approx(float(expected), rel=1e-14)


def test_a_loss_that_is_no_sum_over_tokens_is_refused():
    values, mask = sequences()

    def squared(output):
        total = ((output * mask) ** 2).sum()
        return total, mask.sum().int(), {}

    _, loss_func = by_nominal_parts(lambda: (values, squared), 2)()
    with pytest.raises(Refused, match=r"Fix: --calculate-per-token-loss"):
        loss_func(values)


def test_a_mean_that_the_script_has_taken_is_left_to_it():
    values, mask = sequences()
    _, loss_func = by_nominal_parts(lambda: (values, lambda out: (mean(out, mask), {})), 2)()
    assert len(loss_func(values)) == 2
