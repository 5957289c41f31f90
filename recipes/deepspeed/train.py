"""Train a small Llama with DeepSpeed: an ordinary script without a line of ntp_plugin.

docs/tutorials/deepspeed-recipe.md goes through it.

  cd recipes/deepspeed
  ntp run --standalone --nproc-per-node=4 --ntp-respawn=1 train.py --deepspeed_config ds_config.json
  ntp run --standalone --nproc-per-node=4 --ntp-respawn=1 train.py --deepspeed_config ds_config_tp.json
  ntp run --standalone --nproc-per-node=4 --ntp-respawn=1 train.py --deepspeed_config ds_config_zero3.json

The first is data parallel with ZeRO. In the second, AutoTP cuts the model over two ranks in each of two replicas. In
the third, ZeRO-3 shards the weights too. All run on CPU as they are: the model is random, and nothing is downloaded.
While it runs, kill one of the four workers (their pids are printed). The others go on at once with its samples, and
with its part of the model where it had one. Some twenty seconds later a new process takes its place.

The last line is that of an undisturbed run, except for the last digits. (Adam's eps is 1e-4 here; at 1e-8 Adam turns
rounding into differences of a thousandth.) Without the `ntp` block of the configuration the plugin is off. Takes a
minute or two; PAUSE_S is the pause after each step in seconds, which gives you and the new process time.
"""

import argparse
import os
import time

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH, SAMPLES = 256, 32, 2048
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=172,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
)


class Text(torch.utils.data.Dataset):
    """Sequences in which every second token follows from the one before."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(number))
        tokens[1::2] = (tokens[::2] * 3 + 1) % VOCABULARY
        return tokens


def arguments():
    """Parse the flags."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save", help="a folder for checkpoints: one after each epoch")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    return deepspeed.add_config_arguments(parser).parse_args()


def main():
    """Train for two epochs."""
    args, pause_s = arguments(), float(os.environ.get("PAUSE_S", "0.2"))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = LlamaForCausalLM(CONFIG)
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=Text()
    )
    print(f"slot {os.environ['RANK']} is pid {os.getpid()}", flush=True)
    for _ in range(args.epochs):
        for drawn in loader:
            tokens = drawn.to(engine.device)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            step = engine.global_steps
            engine.step()
            if engine.global_steps > step:
                time.sleep(pause_s)
                if torch.distributed.get_rank() == 0 and engine.global_steps % 8 == 0:
                    print(f"step {engine.global_steps}: loss {loss.item():.6f}", flush=True)
        if args.save:
            engine.save_checkpoint(args.save)
    sharded = engine.zero_optimization_stage() > 2
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=sharded):
        weights = sum(parameter.detach().double().abs().sum() for parameter in model.parameters())
    engine.eval()
    with torch.no_grad():
        tokens = torch.stack([Text()[number] for number in range(16)]).to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss.item()
    if torch.distributed.get_rank() == 0:
        members = torch.distributed.get_world_size()
        print(
            f"done: step {engine.global_steps}, samples {engine.global_samples}, loss {loss:.9f},"
            f" weights here {weights:.6f}, {members} ranks"
        )


main()
