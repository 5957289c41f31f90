"""A hand-written loop over megatron.core: a replica that loses a rank goes on narrower.

NTP_CPU=1 ntp run --standalone --nproc-per-node=4 docs/examples/megatron_core_loop.py

It is Megatron-LM's examples/run_simple_mcore_train_loop.py with its loop in `elastic`.
"""

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from ntp_plugin.megatron import elastic

STEPS = int(os.environ.get("STEPS", "20"))
VOCABULARY, LENGTH = 128, 16


class Tokens(torch.utils.data.Dataset[torch.Tensor]):
    """Sample `number` is drawn from a seed of its own, so that any rank can draw it."""

    def __getitem__(self, number: int) -> torch.Tensor:
        """The tokens, and one more for the last label."""
        return torch.randint(VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(number))

    def __len__(self) -> int:
        """How many samples there are."""
        return 1000


def build(config: Any, *, pre_process: bool, post_process: bool) -> torch.nn.Module:
    """This rank's part of the model."""
    model: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=pre_process,
        post_process=post_process,
    )
    return model


def mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The mean over the tokens of a micro-batch; what is reported is their sum and number, for the global mean."""
    count = torch.tensor(float(losses.numel()), device=losses.device)
    return losses.mean(), {"lm loss": torch.stack([losses.detach().sum(), count])}


def forward_step(samples: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """The forward pass of one micro-batch. Its first dim is the micro-batch size."""
    tokens = next(samples).to(torch.cuda.current_device())
    positions = torch.arange(LENGTH, device=tokens.device).expand(len(tokens), -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=tokens.device).triu(1)
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]), mean_loss


config = TransformerConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=8,
    tensor_model_parallel_size=2,
    use_cpu_initialization=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
with elastic(
    config,
    build,
    forward_step,
    Tokens(),
    vocab_size=VOCABULARY,
    seq_length=LENGTH,
    micro_batch_size=2,
    global_batch_size=16,
    optimizer=OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=1.0),
    flags=sys.argv[1:],
) as job:
    while job.steps_done < STEPS:
        losses = job.step()
        if torch.distributed.get_rank() == 0:
            print(f"step {job.steps_done}: loss {losses['lm loss']:.6f}", flush=True)
