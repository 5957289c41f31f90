"""Run Hugging Face's Trainer through DeepSpeed in ranks of the harness, while some of them die."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ntp_plugin.testing.faults import Fault
from ntp_plugin.testing.ranks import Rank
from tests.harness.hf.fault_points import FAULT_POINTS, report_fault_points
from tests.harness.played_loops import PlayedLoop, run_loop
from tests.harness.played_ranks import Asking
from tests.harness.zero.job import HALVES, SMALL, weights_of

VOCABULARY, LENGTH, RATE = 60, 10, 1e-2
GATHERS = {"stage3_gather_16bit_weights_on_model_save": True}
"""So that the Trainer saves a model with ZeRO-3."""
type Rows = list[list[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One run: a small Llama that the Trainer trains; the script is the recipe's."""

    stage: int = 2
    ranks: int = 4
    each: int = 2
    micro: int = 2
    steps: int = 8
    samples: int = 72
    """4 ranks with 2 micro-batches of 2 samples have 4.5 steps in a data epoch: the last has one micro-batch."""
    dtype: str = "float64"
    enabled: bool = True
    ntp: tuple[tuple[str, Any], ...] = ()
    more: tuple[tuple[str, Any], ...] = ()
    own_schedule: bool = False
    """The configuration has no optimizer and no schedule: they are the Trainer's own."""
    arguments: tuple[tuple[str, Any], ...] = ()
    """Of TrainingArguments."""
    trainer: Callable[..., Any] | None = None
    """Makes the Trainer from its arguments, where it is not transformers' own."""
    lora: bool = False
    """Adapters are trained, and the rest of the model is frozen."""
    evaluates: int = 0
    """Samples that it evaluates, once more at the end; and it takes the world down there, as a script may."""
    folder: str = ""
    resumes: str = ""
    """A checkpoint of another run, from which it begins."""

    @property
    def config(self) -> dict[str, Any]:
        """The config as in a `ds_config.json`."""
        adam = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True}
        schedule = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
        own = {"optimizer": {"type": "AdamW", "params": adam}, "scheduler": {"type": "WarmupLR", "params": schedule}}
        return {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "steps_per_print": 1_000_000,
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": 2000,
                "reduce_scatter": self.dtype != "float64",
                **(SMALL | GATHERS if self.stage > 2 else {}),
            },
            "ntp": {"enabled": self.enabled, **dict(self.ntp)},
            **({} if self.own_schedule else own),
            **({HALVES[self.dtype]: {"enabled": True}} if self.dtype in HALVES else {}),
            **dict(self.more),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """Results of one rank."""

    weights: dict[str, Any]
    log: list[dict[str, Any]]
    steps: int
    epoch: float
    rate: float
    engine_steps: int
    samples: int
    micro_steps: int
    members: int
    writes: bool
    """Whether this rank writes for all."""
    tokens: int


class Text(torch.utils.data.Dataset[Any]):
    """For a language model; sequences have different numbers of labelled tokens."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self._count, self._seed = count, seed

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Any:
        if number >= self._count:
            raise IndexError(number)
        generator = torch.Generator().manual_seed(number + self._seed)
        tokens = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
        labels = tokens.clone()
        labels[LENGTH - number % 5 :] = -100 if number % 5 else labels[LENGTH:]
        return {"input_ids": tokens, "labels": labels}


def run(
    job: Job, *, faults: Sequence[Fault] = (), back: Mapping[int, int] | None = None, leaving: Sequence[int] = ()
) -> tuple[dict[int, Seen], Rows]:
    """Results of the surviving ranks, and what they wrote (`run_loop`)."""
    preload = "deepspeed,transformers.trainer,transformers.models.llama.modeling_llama"
    return run_loop(job, Play, preload=preload, fault_points=FAULT_POINTS, faults=faults, back=back, leaving=leaving)


@functools.cache
def undisturbed(job: Job) -> dict[int, Seen]:
    """The reference run: the same job by the Trainer and DeepSpeed alone."""
    return run(dataclasses.replace(job, enabled=False))[0]


class Play(PlayedLoop):
    """The Trainer in a rank."""

    hooks = "ntp_plugin.deepspeed.hf"

    def train(self, rank: Rank, folder: str) -> Seen:
        return _train(self.job, rank, self.asking, folder)


def _metrics(found: Any) -> dict[str, float]:
    """A number that depends on the order of samples, and on which there are."""
    places = np.arange(1, len(found.predictions) + 1)
    return {"sum": float((found.predictions.sum((1, 2)) * places).sum() + (found.label_ids.sum(1) * places).sum())}


def _in_float64(model: Any) -> Any:
    """Have a Llama compute in float64 throughout: its norms and its loss are in float32 whatever its weights are."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm  # noqa: PLC0415

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        weighed: torch.Tensor = self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return weighed

    def loss(*, logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **_: Any) -> torch.Tensor:
        flat, wanted = logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
        if num_items_in_batch is None:
            return torch.nn.functional.cross_entropy(flat, wanted)
        summed: torch.Tensor = torch.nn.functional.cross_entropy(flat, wanted, reduction="sum") / num_items_in_batch
        return summed

    setattr(LlamaRMSNorm, "forward", norm)  # noqa: B010  (a plain assignment is not for methods)
    model.loss_function = loss
    return model.double()


def _arguments(job: Job, folder: str) -> dict[str, Any]:
    """What TrainingArguments gets."""
    given: dict[str, Any] = {
        "output_dir": folder,
        "deepspeed": job.config,
        "max_steps": job.steps,
        "per_device_train_batch_size": job.micro,
        "gradient_accumulation_steps": job.each,
        "learning_rate": RATE,
        "adam_epsilon": 1e-4,
        "weight_decay": 0.01,
        "optim": "adamw_torch",  # the fused kernel rounds an element by its place in memory
        "warmup_steps": 4,
        # DeepSpeed takes norms in float32, by which a clipped gradient is off by as much
        "max_grad_norm": 0.0 if job.dtype == "float64" else 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return given | dict(job.arguments)


def _make_model(job: Job) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=88,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        pad_token_id=0,
    )
    torch.manual_seed(7)
    model: Any = LlamaForCausalLM(config)
    model = _in_float64(model) if job.dtype == "float64" else model
    if not job.lora:
        return model
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415

    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=4, task_type="CAUSAL_LM"))
    return model.double() if job.dtype == "float64" else model


def _train(job: Job, rank: Rank, asking: Asking, folder: str) -> Seen:
    from transformers import Trainer, TrainingArguments  # noqa: PLC0415

    torch.set_num_threads(1)
    args = TrainingArguments(**_arguments(job, folder))
    trainer = (job.trainer or Trainer)(
        model=_make_model(job),
        args=args,
        train_dataset=Text(job.samples),
        eval_dataset=Text(job.evaluates, 1000) if job.evaluates else None,
        compute_metrics=_metrics if job.evaluates else None,
    )
    if job.enabled:
        report_fault_points(rank, asking)
    trainer.train(resume_from_checkpoint=job.resumes or None)
    if job.evaluates:
        trainer.evaluate()
    engine: Any = trainer.deepspeed
    state: Any = trainer.state
    seen = Seen(
        weights=weights_of(engine),
        log=state.log_history,
        steps=state.global_step,
        epoch=state.epoch,
        rate=trainer._get_learning_rate(),
        engine_steps=engine.global_steps,
        samples=engine.global_samples,
        micro_steps=engine.micro_steps,
        members=torch.distributed.get_world_size(),
        writes=args.should_save,
        tokens=int(state.num_input_tokens_seen),
    )
    if job.evaluates:
        trainer.end()
    return seen
