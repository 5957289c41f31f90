"""Run a plain loop with Hugging Face Accelerate and DeepSpeed in ranks of the harness, while some of them die."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ntp_plugin.testing.faults import Fault
from ntp_plugin.testing.ranks import Rank
from tests.harness.accelerate.fault_points import FAULT_POINTS, report_fault_points
from tests.harness.played_loops import PlayedLoop, run_loop
from tests.harness.zero.job import SMALL, weights_of
from tests.harness.zero.models import FEATURES

RATE = 1e-2
type Rows = list[list[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One run: a small model in a script as people write it (`script.py`)."""

    stage: int = 2
    ranks: int = 4
    each: int = 2
    micro: int = 2
    epochs: int = 2
    samples: int = 72
    """4 ranks with 2 micro-batches of 2 samples have 4.5 steps in a data epoch: the last has one micro-batch."""
    dtype: str = "float64"
    enabled: bool = True
    ntp: tuple[tuple[str, Any], ...] = ()
    schedule: str = "torch"
    """Whose learning rates: of a scheduler of torch's, of DeepSpeed's ("config"), or none ("")."""
    by_environment: bool = False
    """The configuration comes as `accelerate launch --use_deepspeed` gives it, and not as a plugin."""
    loading: tuple[tuple[str, Any], ...] = ()
    """Of DataLoaderConfiguration."""
    accelerator: tuple[tuple[str, Any], ...] = ()
    """Of Accelerator."""
    workers: int = 0
    accumulates: bool = True
    """The loop has `with accelerator.accumulate(model)`."""
    gathers: bool = False
    """It gathers the loss of each micro-batch before the backward, reduces a number after each step and waits."""
    evaluates: int = 0
    """Samples that it evaluates after each data epoch."""
    saves: int = 0
    """Steps from one `save_state` to the next."""
    skips: int = 0
    """Batches of the first data epoch that `skip_first_batches` leaves out."""
    iterable: bool = False
    folder: str = ""

    @property
    def config(self) -> dict[str, Any]:
        """The config as in a `ds_config.json`."""
        schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": RATE, "warmup_min_lr": 0.0}}
        adam = {"lr": RATE, "eps": 1e-4, "weight_decay": 0.01, "torch_adam": True}
        by_config = {"optimizer": {"type": "AdamW", "params": adam}, "scheduler": schedule}
        return {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": self.each,
            "gradient_clipping": 0.0 if self.dtype == "float64" else 0.5,
            "steps_per_print": 1_000_000,
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": 2000,
                "reduce_scatter": self.dtype != "float64",
                **(SMALL | {"stage3_gather_16bit_weights_on_model_save": True} if self.stage > 2 else {}),
            },
            "ntp": {"enabled": self.enabled, **dict(self.ntp)},
            **(by_config if self.schedule == "config" else {}),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """Results of one rank."""

    weights: dict[str, Any]
    steps: int
    """As the script has counted them by `accelerator.sync_gradients`."""
    rates: list[float]
    """The learning rate after each step, as the script has seen it."""
    engine_steps: int
    samples: int
    micro_steps: int
    members: int
    is_main: bool
    used: list[list[int]]
    """The samples of each data epoch's last draws in this rank."""
    metrics: list[float]
    """One number of each evaluation."""
    reduced: list[float]
    warnings: list[str] = dataclasses.field(default_factory=list)
    """Those of the plugin's part for such loops."""


def run(
    job: Job, *, faults: Sequence[Fault] = (), back: Mapping[int, int] | None = None, leaving: Sequence[int] = ()
) -> tuple[dict[int, Seen], Rows]:
    """Results of the surviving ranks, and what they wrote (`run_loop`)."""
    return run_loop(
        job, Play, preload="deepspeed,accelerate", fault_points=FAULT_POINTS, faults=faults, back=back, leaving=leaving
    )


@functools.cache
def undisturbed(job: Job) -> dict[int, Seen]:
    """The reference run: the same job by accelerate and DeepSpeed alone."""
    return run(dataclasses.replace(job, enabled=False))[0]


class Play(PlayedLoop):
    """The script in a rank."""

    hooks = "ntp_plugin.deepspeed.accelerate_loop"

    def train(self, rank: Rank, folder: str) -> Seen:
        from tests.harness.accelerate import script  # noqa: PLC0415  (it imports accelerate)

        torch.set_num_threads(1)
        if self.job.enabled:
            report_fault_points(rank, self.asking)
        with _warnings() as warnings:
            seen: Seen = script.train(self.job, folder)
        return dataclasses.replace(seen, warnings=warnings)


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ntp_plugin.deepspeed.accelerate_loop")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def make_model(job: Job) -> torch.nn.Module:
    """Make a small model with a few layers."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 24), torch.nn.Tanh(), torch.nn.LayerNorm(24), torch.nn.Linear(24, 1)
    )
    return model.double() if job.dtype == "float64" else model


def results(job: Job, accelerator: Any, engine: Any, **found: Any) -> Seen:
    """Return what a rank has at the end of the script."""
    del job
    return Seen(
        weights=weights_of(engine),
        engine_steps=engine.global_steps,
        samples=engine.global_samples,
        micro_steps=engine.micro_steps,
        members=torch.distributed.get_world_size(),
        is_main=accelerator.is_main_process,
        **found,
    )
