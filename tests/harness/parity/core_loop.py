"""A hand-written loop over megatron.core: by itself, without the plugin, and within `elastic` while ranks die."""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ntp_plugin.recovery.fault_points import FAULT_POINTS
from ntp_plugin.testing.faults import Fault
from ntp_plugin.testing.ranks import Rank, Ranks
from tests.harness.parity.job import have_megatron_imported
from tests.harness.parity.live import report_fault_points
from tests.harness.played_ranks import Asking, asking_of, played, quietly

STEPS, SLOTS = 8, 4
VOCABULARY, LENGTH, MICRO, GLOBAL = 64, 8, 1, 6
RATE, DECAY = 2e-3, 0.01
LOCAL = ("--transformer-impl", "local")


class Tokens(torch.utils.data.Dataset[torch.Tensor]):
    """Samples drawn from seeds of their own; 20 of them, so a loop begins them again."""

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.randint(VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(number))

    def __len__(self) -> int:
        return 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoreJob:
    """The layout of the four ranks, and the flags of the plugin."""

    pp: int = 1
    sharded: bool = False
    flags: tuple[str, ...] = ()
    spoil: bool = False
    """Whether a degraded replica weighs its gradients as if it had computed its nominal share."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """What one rank has at the end: its losses, and its weights by name."""

    losses: dict[int, float]
    weights: dict[str, Any]
    width: int


def configuration(job: CoreJob) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: PLC0415  (only ranks know Megatron)

    return TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=8,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=job.pp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float32,  # which the emulation means by it, and the default was made before
    )


def optimizer_configuration(job: CoreJob) -> Any:
    from megatron.core.optimizer import OptimizerConfig  # noqa: PLC0415

    names = ("params_dtype", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    dtypes = dict.fromkeys(names, torch.float32)
    return OptimizerConfig(
        optimizer="adam",
        lr=RATE,
        weight_decay=DECAY,
        adam_eps=1e-4,
        clip_grad=0.5,
        use_distributed_optimizer=job.sharded,
        **dtypes,
    )


def build(config: Any, *, pre_process: bool, post_process: bool) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: PLC0415
    from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: PLC0415

    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=pre_process,
        post_process=post_process,
    )


def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    count = torch.tensor(float(losses.numel()))
    return losses.mean(), {"lm loss": torch.stack([losses.detach().sum(), count])}


def forward_step(samples: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    tokens = next(samples)
    positions = torch.arange(LENGTH).expand(len(tokens), -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]), loss_of


# ---------------------------------------------------------------- by itself


def by_itself(job: CoreJob) -> dict[int, Trained]:
    """Run the loop without the plugin, as Megatron-LM's example has it."""
    have_megatron_imported(LOCAL)
    with Ranks(SLOTS, PlayByItself(job)) as ranks:
        return ranks.wait()


@dataclasses.dataclass(frozen=True)
class PlayByItself:
    """The program of a rank without the plugin."""

    job: CoreJob

    def __call__(self, rank: Rank) -> Trained:
        return quietly(rank.slot, functools.partial(_by_itself, self.job, rank))


def _by_itself(job: CoreJob, rank: Rank) -> Trained:
    from ntp_plugin.megatron import cpu_emulation  # noqa: PLC0415

    cpu_emulation.install(cpu_emulation.FLOAT64, LOCAL)
    from megatron.core import parallel_state  # noqa: PLC0415
    from megatron.core.distributed import (  # noqa: PLC0415
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import get_megatron_optimizer  # noqa: PLC0415
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: PLC0415
    from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: PLC0415
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: PLC0415

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(rank.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    dist.init_process_group("gloo", rank=rank.slot, world_size=SLOTS)
    parallel_state.initialize_model_parallel(2, job.pp)
    seed = 1234 + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    config, first, last = (
        configuration(job),
        parallel_state.is_pipeline_first_stage(),
        parallel_state.is_pipeline_last_stage(),
    )
    model = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(),
        module=build(config, pre_process=first, post_process=last),
    )
    optimizer = get_megatron_optimizer(optimizer_configuration(job), [model])
    schedule = OptimizerParamScheduler(  # which also exempts biases and norms from the weight decay
        optimizer,
        init_lr=0.0,
        max_lr=RATE,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=1000,
        lr_decay_style="constant",
        start_wd=DECAY,
        end_wd=DECAY,
        wd_incr_steps=1000,
        wd_incr_style="constant",
    )
    config.finalize_model_grads_func = finalize_model_grads
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    each, data, losses = GLOBAL // MICRO // replicas, Tokens(), {}
    for step in range(1, STEPS + 1):
        begin = (step - 1) * GLOBAL
        mine = (data[(begin + number) % len(data)][None] for number in range(replica, GLOBAL, replicas))
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reported = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=mine,
            model=model,
            num_microbatches=each,
            seq_length=LENGTH,
            micro_batch_size=MICRO,
            forward_only=False,
        )
        optimizer.step()
        schedule.step(increment=GLOBAL)
        if last:
            sums = torch.stack([one["lm loss"] for one in reported]).sum(0)
            dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
            losses[step] = float(sums[0] / sums[1])
    trained = Trained(losses=losses, weights=weights_of(model), width=2)
    dist.destroy_process_group()
    return trained


def weights_of(model: Any) -> dict[str, Any]:
    return {name: value.detach().double().numpy() for name, value in model.module.named_parameters()}


# ---------------------------------------------------------------- within the plugin


@dataclasses.dataclass(frozen=True)
class Play:
    """The program of a rank, in a process of its own."""

    job: CoreJob
    asking: Asking = dataclasses.field(default_factory=Asking)

    def __call__(self, rank: Rank) -> Trained:
        return quietly(rank.slot, functools.partial(self._play, rank))

    def _play(self, rank: Rank) -> Trained:
        os.environ |= rank.environment()
        from ntp_plugin.megatron import cpu_emulation  # noqa: PLC0415

        cpu_emulation.install(cpu_emulation.FLOAT64, LOCAL)
        from ntp_plugin.megatron import elastic  # noqa: PLC0415
        from ntp_plugin.megatron.live import start  # noqa: PLC0415
        from ntp_plugin.megatron.reduction.lane_sync import LaneSync  # noqa: PLC0415

        report_fault_points(rank, self.asking)
        if self.job.spoil:
            setattr(LaneSync, "scale", 0.5)  # noqa: B010
        losses: dict[int, float] = {}
        with elastic(
            configuration(self.job),
            build,
            forward_step,
            Tokens(),
            vocab_size=VOCABULARY,
            seq_length=LENGTH,
            micro_batch_size=MICRO,
            global_batch_size=GLOBAL,
            optimizer=optimizer_configuration(self.job),
            flags=(*LOCAL, *self.job.flags),
        ) as loop:
            while loop.steps_done < STEPS:
                reported = loop.step()
                if reported:  # on the last stage
                    losses[loop.steps_done] = reported["lm loss"]
            now = start.Jobs.now
            assert now is not None, "the job has not ended"
            width = now.trainer.layout(now.trainer.lost).width
            return Trained(losses=losses, weights=weights_of(loop.model), width=width)


def within(
    job: CoreJob,
    *,
    faults: Sequence[Fault] = (),
    back: Mapping[int, int] | None = None,
    leaving: Sequence[int] = (),
) -> dict[int, Trained]:
    """Run the loop within `elastic`; arguments as in `live`."""
    back = back or {}
    have_megatron_imported(LOCAL)
    play = Play(job, asking_of(back))
    outcomes, _ = played(SLOTS, play, faults=faults, fault_points=FAULT_POINTS, back=back, leaving=leaving)
    return outcomes
