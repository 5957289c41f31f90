"""Negative controls of multi-token prediction; `spoilt.py` has all others."""

from typing import Any

import torch

from ntp_plugin.megatron.layers import token_prediction
from ntp_plugin.megatron.prediction_losses import PredictionLosses
from tests.harness.parity.conditions import plant

__all__ = ["columns_of_another_slot", "predictions_found_by_even_parts", "predictions_of_each_replica"]


def columns_of_another_slot() -> None:
    """A slot takes the gradient of its columns one column too far."""

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        start, stop = ctx.bounds
        return gradient.roll(1, dims=-1)[..., start:stop].contiguous(), None, None

    plant(token_prediction._Gather, "backward", staticmethod(backward))


def predictions_of_each_replica() -> None:
    """A replica logs what it has computed alone."""
    plant(PredictionLosses, "reduce", lambda *_: lambda: None)


def predictions_found_by_even_parts() -> None:
    """Megatron's own search for the most likely token, in uneven parts of the vocabulary."""
    plant(token_prediction.UnevenPrediction, "most_likely", lambda _, original: original)
