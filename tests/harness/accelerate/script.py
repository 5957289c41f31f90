"""The script of a user: a plain loop with accelerate."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DeepSpeedPlugin, DummyOptim, DummyScheduler
from torch.utils.data import DataLoader, IterableDataset

from tests.harness.accelerate.job import RATE, Job, Seen, make_model, results
from tests.harness.zero.models import Samples


class _Stream(IterableDataset[Any]):
    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __iter__(self) -> Any:
        return (self._samples[number] for number in range(len(self._samples)))


def _make_accelerator(job: Job, folder: str) -> Accelerator:
    given: dict[str, Any] = dict(job.accelerator)
    if job.by_environment:
        path = Path(folder) / f"ds_config-{os.environ['RANK']}.json"
        path.write_text(json.dumps(job.config))
        os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}
    else:
        given["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=job.config)
    return Accelerator(dataloader_config=DataLoaderConfiguration(**dict(job.loading)), **given)


def train(job: Job, folder: str) -> Seen:
    accelerator = _make_accelerator(job, folder)
    dtype = getattr(torch, job.dtype)
    samples = Samples(job.samples, dtype)
    torch.manual_seed(3)
    data: Any = _Stream(samples) if job.iterable else samples
    workers: dict[str, Any] = {}
    if job.workers:  # by the start method that a process has which is no child of a fork server
        workers = {"num_workers": job.workers, "multiprocessing_context": "fork"}
    loader: Any = DataLoader(data, batch_size=job.micro, shuffle=not job.iterable, **workers)
    held_out: Any = DataLoader(Samples(job.evaluates or 1, dtype), batch_size=job.micro)
    model: Any = make_model(job)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=RATE, eps=1e-4, weight_decay=0.01, foreach=False)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 20))
    if job.schedule == "config":
        optimizer = DummyOptim(model.parameters(), lr=RATE)
        scheduler = DummyScheduler(optimizer, warmup_num_steps=4)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)

    completed = 0
    rates: list[float] = []
    metrics: list[float] = []
    reduced: list[float] = []
    used: list[list[int]] = []
    for epoch in range(job.epochs):
        model.train()
        active = accelerator.skip_first_batches(loader, job.skips) if job.skips and not epoch else loader
        used.append([])
        for numbers, x, y in active:
            with accelerator.accumulate(model) if job.accumulates else contextlib.nullcontext():
                loss = (model(x).squeeze(-1) - y).square().mean()
                if job.gathers:
                    accelerator.gather(loss.repeat(len(x))).mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            used[-1] += numbers.tolist()
            if accelerator.sync_gradients:
                completed += 1
                rates.append(float(scheduler.get_last_lr()[0]))
                if job.gathers:
                    reduced.append(float(accelerator.reduce(torch.tensor(float(completed)), reduction="mean")))
                    accelerator.wait_for_everyone()
                if job.saves and completed % job.saves == 0:
                    accelerator.save_state(f"{folder}/step_{completed}")
        if job.evaluates:
            metrics.append(_evaluate(accelerator, model, held_out))
    accelerator.wait_for_everyone()
    seen = results(
        job,
        accelerator,
        model,
        steps=completed,
        rates=rates,
        metrics=metrics,
        reduced=reduced,
        used=used,
    )
    accelerator.end_training()
    return seen


def _evaluate(accelerator: Any, model: Any, held_out: Any) -> float:
    model.eval()
    found: list[Any] = []
    for numbers, x, y in held_out:
        with torch.no_grad():
            out = model(x).squeeze(-1)
        gathered, wanted, which = accelerator.gather_for_metrics((out, y, numbers))
        found.append((gathered - wanted).square() * (1 + which))
    return float(torch.cat(found).sum())
