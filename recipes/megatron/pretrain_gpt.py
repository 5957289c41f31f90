"""Train a GPT with Megatron: an ordinary script without a line of ntp_plugin, on GPUs or on a laptop.

docs/tutorials/megatron-recipe.md goes through it. Under `ntp run` a rank may die at any time, and the others go on:

  NTP_CPU=1 OMP_NUM_THREADS=1 ntp run --standalone --nproc-per-node=8 --ntp-respawn=1 \\
      recipes/megatron/pretrain_gpt.py @recipes/megatron/tiny.args --tensor-model-parallel-size 4 --ntp-enable

Start with a missing slot: two replicas of TP 4, the second without one, so 7 processes. About half a minute on CPU:

  NTP_CPU=1 OMP_NUM_THREADS=1 torchrun --nproc-per-node=7 -m ntp_plugin.megatron recipes/megatron/pretrain_gpt.py \\
      @recipes/megatron/tiny.args --tensor-model-parallel-size 4 --ntp-enable --ntp-lost r1.s0.t3

You see Megatron's own log. With 8 processes and without the last two words the losses are the same, except for the
last digits. A layout that does not work is refused before anything is built, with a fix.

On GPUs leave NTP_CPU and tiny.args' last three lines out; a job that starts with a missing slot needs
`--use-cpu-initialization` (nothing has run on GPUs yet). The data are mock (`--mock-data`), or tokens in a file
(`--data-path PREFIX`; tokenize_text.py makes one of a text). Logs go where Megatron's own flags say:
`--tensorboard-dir`, `--wandb-project`.
"""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

KEYS = ("tokens", "labels", "position_ids", "loss_mask")


def datasets(sizes: list[int], vp_stage: int | None = None) -> Any:  # noqa: ARG001
    """Build the training, validation and test sets."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None if args.mock_data else get_blend_from_list(args.data_path),
        split=args.split or "90,5,5",
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=args.data_cache_path,
    )
    on_first = lambda: parallel_state.get_tensor_model_parallel_rank() == 0  # noqa: E731
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, sizes, on_first, config).build()


datasets.is_distributed = True  # type: ignore[attr-defined]


def get_batch(samples: Iterator[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Return this rank's part of the next micro-batch; the first rank of the TP group draws it for the others."""
    args, group = get_args(), parallel_state.get_tensor_model_parallel_group()
    first, shape = parallel_state.get_tensor_model_parallel_src_rank(), (args.micro_batch_size, args.seq_length)
    device = torch.cuda.current_device()
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        drawn = next(samples)
        batch = [drawn[key].to(device).contiguous() for key in KEYS]
    else:
        kinds = [torch.int64, torch.int64, torch.int64, torch.float32]
        batch = [torch.empty(shape, dtype=kind, device=device) for kind in kinds]
    for part in batch:
        torch.distributed.broadcast(part, first, group=group)
    context = parallel_state.get_context_parallel_group()
    parts = get_batch_on_this_cp_rank(dict(zip(KEYS, batch, strict=True)), is_hybrid_cp=False, cp_group=context)
    return [parts[key] for key in KEYS]


def loss_func(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return the sum of the losses of a micro-batch's tokens, and their number."""
    total, count = (output.float() * loss_mask).sum(), loss_mask.sum().to(torch.int)
    return total, count, {"lm loss": torch.stack([total.detach(), count.to(total.dtype)])}


def forward_step(
    samples: Iterator[dict[str, torch.Tensor]], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    """Compute the forward pass of one micro-batch, or plan it (`--overlap-moe-expert-parallel-comm`)."""
    tokens, labels, position_ids, loss_mask = get_batch(samples)
    forward = model.build_schedule_plan if return_schedule_plan else model
    return forward(tokens, position_ids, None, labels=labels, loss_mask=loss_mask), functools.partial(
        loss_func, loss_mask
    )


def main() -> None:
    """Train as the arguments say."""
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)


def read_files(words: list[str]) -> list[str]:
    """Replace each @FILE among the words by the words in the file."""
    return [part for word in words for part in (Path(word[1:]).read_text().split() if word[0] == "@" else [word])]


if __name__ == "__main__":
    sys.argv[1:] = read_files(sys.argv[1:])
    main()
