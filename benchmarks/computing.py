"""Measure how long a model computes by itself in a step, in a job whose ranks compute between their messages."""

import time

import torch


class Computing:
    """How long a model has computed, by itself, on this rank."""

    def __init__(self) -> None:
        self._seconds = self._since = 0.0
        self.asleep = 0.0
        """So long, from now on, in the midst of the next forward."""

    def watch(self, model: torch.nn.Module) -> None:
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._count)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._count)  # type: ignore[no-untyped-call]

    def watch_backward(self, loss: torch.Tensor) -> None:
        loss.register_hook(self._begin)  # type: ignore[no-untyped-call]

    def taken(self) -> float:
        """Since this was asked last."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _begin(self, *_: object) -> None:
        self._since = time.perf_counter()
        if self.asleep:
            time.sleep(self.asleep)
            self.asleep = 0.0

    def _count(self, *_: object) -> None:
        now = time.perf_counter()
        self._seconds, self._since = self._seconds + now - self._since, now
