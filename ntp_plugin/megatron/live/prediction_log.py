"""The losses of multi-token prediction in the log of a live job.

Micro-batches add to Megatron's sums as they run, and the log reduces them after the step. So a step that a loss
interrupts begins with no sums, and where a loss comes between a step and its log, the sums of a lost rank are missing:
the log leaves these losses out of that interval, and one line says so.
"""

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

if TYPE_CHECKING:
    from ntp_plugin.megatron.live.start import MegatronJob

_LOG = logging.getLogger(__name__)


class PredictionLog:
    """Keeps to which epoch the sums of this rank belong."""

    def __init__(self, job: "MegatronJob") -> None:
        self._job = job
        self._summed_in = -1

    def begin_step(self) -> None:
        """Forget the sums of a step that was interrupted."""
        MTPLossLoggingHelper.clean_metrics_in_tracker()
        self._summed_in = self._job.rank.groups.epoch

    def tracked(self, original: Any) -> Any:
        """`track_mtp_metrics`: log what the ranks of this step have summed, or leave it out."""

        @functools.wraps(original)
        def track(scale: float, iteration: int, *writers: Any, **kwargs: Any) -> None:
            job = self._job
            if job.trainer.idle:  # it has no sums, and those who train do not wait for it
                return
            left_out = functools.partial(self._left_out, iteration, *writers[2:], **kwargs)
            if self._summed_in != job.rank.groups.epoch:
                left_out()
            else:
                job.loop.between(lambda: original(scale, iteration, *writers, **kwargs), left_out)

        return track

    def _left_out(self, iteration: int, totals: dict[str, torch.Tensor] | None = None, **named: Any) -> None:
        MTPLossLoggingHelper.clean_metrics_in_tracker()
        totals = named.get("total_loss_dict") if totals is None else totals
        if totals is not None:  # Megatron's log has no numbers that are not
            totals |= {
                f"mtp_{layer + 1} loss": torch.tensor(torch.nan) for layer in range(self._job.args.mtp_num_layers)
            }
        if self._job.trainer.first:
            _LOG.warning(
                "the losses of multi-token prediction are left out of the log of step %d: a rank was lost", iteration
            )
