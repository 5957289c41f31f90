"""The losses of multi-token prediction (`--mtp-num-layers`) that Megatron logs, in replicas of different width.

Megatron adds them up beside the loss, over the micro-batches of a replica, and takes the mean over the replicas when it
logs a step. Here replicas run different numbers of micro-batches, so their sums are added and divided by the number of
full-width replicas, as the loss itself is. A replica without micro-batches has no sums and adds zeros.
"""

import functools
from typing import Any

import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from ntp_plugin.megatron.job import JobPlan
from ntp_plugin.megatron.reduction.lane_sync import LaneSync

SUMS = ("loss_values", "correct_values", "total_values")
"""What Megatron keeps for each layer: losses, right predictions, and all predictions."""


class PredictionLosses:
    """Replaces how Megatron reduces these sums."""

    def __init__(self, job: JobPlan, sync: LaneSync) -> None:
        self._job, self._sync = job, sync

    def reduce(self, original: Any) -> Any:
        """`MTPLossLoggingHelper.reduce_metrics_in_tracker`; all ranks that train call it together."""

        @functools.wraps(original)
        def reduce() -> None:
            kept, layers = MTPLossLoggingHelper.tracker, self._job.args.mtp_num_layers
            none = torch.zeros(layers, device=self._sync.device)
            summed = self._sync.over_replicas(torch.stack([kept.get(name, none) for name in SUMS]))
            if self._job.layout.last:
                kept |= dict(zip(SUMS, summed, strict=True))
                kept["loss_values"] /= self._job.batch.replicas

        return reduce
