"""A DeepSpeed script that makes its own process group, so it puts the plugin in before that.

ntp run --standalone --nproc-per-node=2 docs/examples/deepspeed_enable.py
"""

import os

import torch
import torch.distributed as dist

from ntp_plugin.deepspeed import enable

enable()
dist.init_process_group("gloo")

import deepspeed  # noqa: E402  (in a script of your own it may stand anywhere)

STEPS = int(os.environ.get("STEPS", "20"))
CONFIG = {
    "ntp": {"enabled": True},
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
}


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """4,096 samples, each drawn from its number."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.randn(8, generator=torch.Generator().manual_seed(number))


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
engine, _, loader, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), training_data=Numbers(), config=CONFIG
)
for x in loader:
    loss = (engine(x).squeeze(1) - x.sin().sum(1)).square().mean()
    engine.backward(loss)
    engine.step()
    if engine.global_steps >= STEPS:
        break
if dist.get_rank() == 0:
    print(f"step {engine.global_steps}: loss {loss.item():.4f}")
