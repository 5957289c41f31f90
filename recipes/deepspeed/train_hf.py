"""Trains a tiny Llama with the Hugging Face `Trainer` through DeepSpeed. Nothing here knows of the plugin: the
configuration enables it.

    ntp run --nproc-per-node 4 recipes/deepspeed/train_hf.py --deepspeed recipes/deepspeed/ds_config_hf.json \\
        --output_dir /tmp/hf --max_steps 40 --gradient_accumulation_steps 2 --per_device_train_batch_size 2 \\
        --logging_steps 4

While it runs, kill one of the processes whose pid it prints.
"""

import os
import time

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

VOCABULARY, LENGTH = 64, 16
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
    pad_token_id=0,
)


class Text(torch.utils.data.Dataset):
    """Sequences whose every second token follows from the one before it; the last tokens of some are not labelled."""

    def __len__(self):
        """Return how many there are."""
        return 256

    def __getitem__(self, number):
        """Make one."""
        if number >= len(self):
            raise IndexError(number)
        tokens = torch.randint(1, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(number))
        tokens[1::2] = (tokens[::2] * 3 + 1) % VOCABULARY
        labels = tokens.clone()
        labels[LENGTH - number % 5 :] = -100
        return {"input_ids": tokens, "labels": labels}


class Slowly(TrainerCallback):
    """Leaves time to kill a process."""

    def on_step_end(self, args, state, control, **kwargs):  # noqa: ARG002
        """Wait after each step."""
        time.sleep(float(os.environ.get("PAUSE_S", "0.2")))


def main():
    """Train, and print what the log has."""
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    trainer = Trainer(model=model, args=args, train_dataset=Text(), eval_dataset=Text(), callbacks=[Slowly()])
    print(f"slot {os.environ['RANK']} is pid {os.getpid()}", flush=True)
    trainer.train()
    if trainer.is_world_process_zero():
        weights = sum(parameter.detach().double().abs().sum() for parameter in model.parameters())
        members = torch.distributed.get_world_size()
        print(f"done: step {trainer.state.global_step}, weights {weights:.6f}, {members} ranks")


main()
