"""Train a small network whose layers this script cuts itself, over the groups of an `mpu`.

  cd recipes/deepspeed
  ntp run --standalone --nproc-per-node=4 --ntp-respawn=2 train_mpu.py --deepspeed_config ds_config_mpu.json

Two replicas of two ranks. While it runs, kill one of the four workers (their pids are printed). Only this script knows
how its layers are cut, so the other rank of that replica leaves too, and the other replica goes on with all samples.
Some twenty seconds later two new processes take their places together. The last line is that of an undisturbed run,
except for the last digits. Takes a minute; PAUSE_S is the pause after each step in seconds, which gives you and the new
processes time.
"""

import argparse
import os
import time

import deepspeed
import torch
import torch.distributed as dist

TP, FEATURES, SAMPLES = 2, 16, 1024


class Mpu:
    """The groups, sizes and ranks that DeepSpeed asks for."""

    def __init__(self):
        rank, size = dist.get_rank(), dist.get_world_size()
        self._replicas = [dist.new_group(list(range(first, first + TP))) for first in range(0, size, TP)]
        self._same = [dist.new_group(list(range(first, size, TP))) for first in range(TP)]
        self._replica, self._place = rank // TP, rank % TP

    def get_model_parallel_group(self):
        """Return the group of this replica."""
        return self._replicas[self._replica]

    def get_model_parallel_world_size(self):
        """Return the size of that group."""
        return dist.get_world_size(self.get_model_parallel_group())

    def get_model_parallel_rank(self):
        """Return this rank's place in that group."""
        return dist.get_rank(self.get_model_parallel_group())

    def get_data_parallel_group(self):
        """Return the group of the ranks that hold the same part as this one."""
        return self._same[self._place]

    def get_data_parallel_world_size(self):
        """Return the size of that group."""
        return dist.get_world_size(self.get_data_parallel_group())

    def get_data_parallel_rank(self):
        """Return this rank's place in that group."""
        return dist.get_rank(self.get_data_parallel_group())


class Summed(torch.autograd.Function):
    """A sum over a replica, in the forward or in the backward."""

    @staticmethod
    def forward(context, x, group, there):
        """Sum the parts (`there`), or return the input."""
        context.group = None if there else group
        if there:
            x = x.contiguous().clone()
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(context, gradient):
        """Return the gradient, or its sum where the forward did not sum."""
        if context.group is not None:
            gradient = gradient.contiguous().clone()
            dist.all_reduce(gradient, group=context.group)
        return gradient, None, None


class Block(torch.nn.Module):
    """Two layers, the first cut by rows and the second by columns."""

    def __init__(self, mpu, hidden):
        super().__init__()
        self.group = mpu.get_model_parallel_group()
        up, down = torch.nn.Linear(FEATURES, hidden, bias=False), torch.nn.Linear(hidden, FEATURES)
        self.up = self._part(up.weight.chunk(TP)[mpu.get_model_parallel_rank()])
        self.down = self._part(down.weight.chunk(TP, dim=1)[mpu.get_model_parallel_rank()])
        self.bias = down.bias

    @staticmethod
    def _part(values):
        part = torch.nn.Parameter(values.detach().clone())
        part.tensor_model_parallel = True  # for the norm of the gradients
        return part

    def forward(self, x):
        """Compute what an uncut block would."""
        hidden = torch.nn.functional.linear(Summed.apply(x, self.group, False), self.up).tanh()
        return x + Summed.apply(torch.nn.functional.linear(hidden, self.down), self.group, True) + self.bias


class Numbers(torch.utils.data.Dataset):
    """Random vectors with the sum of their sines as the target."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        x = torch.randn(FEATURES, generator=torch.Generator().manual_seed(number))
        return x, x.sin().sum()


def arguments():
    """Parse the flags."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    return deepspeed.add_config_arguments(parser).parse_args()


def main():
    """Train for two epochs."""
    args, pause_s = arguments(), float(os.environ.get("PAUSE_S", "0.1"))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    mpu = Mpu()
    model = torch.nn.Sequential(Block(mpu, 64), Block(mpu, 64), torch.nn.Linear(FEATURES, 1))
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=Numbers(), mpu=mpu
    )
    print(f"slot {os.environ['RANK']} is pid {os.getpid()}", flush=True)
    for _ in range(args.epochs):
        for x, y in loader:
            loss = (engine(x.to(engine.device)).squeeze(-1) - y.to(engine.device)).square().mean()
            engine.backward(loss)
            step = engine.global_steps
            engine.step()
            if engine.global_steps > step:
                time.sleep(pause_s)
                if dist.get_rank() == 0 and engine.global_steps % 8 == 0:
                    print(f"step {engine.global_steps}: loss {loss.item():.6f}", flush=True)
    if dist.get_rank() == 0:
        weights = sum(parameter.detach().double().abs().sum() for parameter in model.parameters())
        print(
            f"done: step {engine.global_steps}, samples {engine.global_samples}, weights here {weights:.6f},"
            f" {dist.get_world_size()} ranks"
        )


main()
