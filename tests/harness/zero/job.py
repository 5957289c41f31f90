"""Run a DeepSpeed job live in ranks of the harness, as `ntp run` starts it, while some ranks die."""

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from ntp_plugin.testing.faults import Fault
from ntp_plugin.testing.ranks import Rank
from tests.harness.played_ranks import Asking, asking_of, played, quietly
from tests.harness.zero import fused_adam, gpu_optimizers
from tests.harness.zero.fault_points import FAULT_POINTS, FORWARDS, report_fault_points, wait_for_a_loss
from tests.harness.zero.models import CUT, Samples, Tokens, make_model, make_transformer
from tests.harness.zero.own_layers import Mpu, Own

STEPS, RATE = 20, 1e-2
SMALL = {
    "stage3_param_persistence_threshold": 20,
    "stage3_prefetch_bucket_size": 200,
    "stage3_max_live_parameters": 1000,
    "stage3_max_reuse_distance": 300,
    "sub_group_size": 100,
}
"""Limits of ZeRO-3 for a small model: some parameters persist, some are prefetched, and groups are cut."""
HALVES = {"bfloat16": "bf16", "float16": "fp16"}
"""Dtypes that DeepSpeed trains in with masters in float32."""


class Block(dict[str, Any]):
    """A block of a configuration, in a job that is a key of a cache."""

    def __hash__(self) -> int:  # type: ignore[override]
        """Return the hash of what is in it."""
        return hash(repr(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One run: a small model that a loop of its own trains through DeepSpeed."""

    stage: int = 0
    ranks: int = 4
    tp: int = 1
    """Slots of a replica, cut by AutoTP."""
    mpu: bool = False
    """They are put together by an mpu of the script, and the layers are the script's own."""
    pair: bool = False
    """The model that is cut where `tp` is more, whatever it is."""
    transformer: str = ""
    """One of transformers in place of a few layers (`models.py`)."""
    each: int = 2
    """Micro-batches of a replica in a step."""
    micro: int = 2
    steps: int = STEPS
    epochs: int = 5
    dtype: str = "float64"
    enabled: bool = True
    ntp: tuple[tuple[str, Any], ...] = ()
    more: tuple[tuple[str, Any], ...] = ()
    zero: str = "{}"
    """Further keys of `zero_optimization`, as JSON."""
    torch_adam_offloaded: bool = False
    """Torch's Adam steps what is offloaded, in place of DeepSpeed's CPUAdam."""
    zero_init: bool = False
    """The model is made sharded, by `deepspeed.zero.Init`."""
    saves_model: int = 0
    """The step after which it writes the model alone, by `save_16bit_model`."""
    fused_adam: str = ""
    """DeepSpeed's in place of torch's: "own", or its class with a kernel of torch's, which is "known" to treat each
    element alike, or "refused" where it is taken for the CPU's."""
    dropout: float = 0.0
    own_loader: bool = False
    """The script makes its loader, and shuffles again in each data epoch."""
    unfollowed: bool = False
    """The script trains on a loader that cannot be rewound, after an evaluation by one that can."""
    saves: int = 0
    """The step after which it writes a checkpoint."""
    saves_each: int = 0
    """It requests a checkpoint after each micro-batch if so many steps divide the completed ones."""
    saves_turns: bool = False
    """It writes a checkpoint after each data epoch."""
    folder: str = ""
    """Of that; one of the run's own where there is none."""
    gathers_turns: bool = False
    """It runs a collective of its own on all ranks after each data epoch; each rank writes to its folder."""
    goes_on: bool = False
    """It begins from the newest checkpoint, in the data epoch that is noted there."""
    copies: str = ""
    """A folder for them that outlives the ranks."""
    resumes: str = ""
    """The dead run that it resumes from."""
    loads: bool = False
    """It only loads the checkpoint."""
    calls: tuple[Any, ...] = ()
    """A method of the engine that the loop calls after each step, and with what."""
    unlike: bool = False
    """Slot 1 begins with another weight in what all slots have."""
    frozen: str = ""
    """A parameter that is not trained."""
    evaluates: int | None = None
    """The step after which it goes forward a few times without training; and once more, after a checkpoint there."""
    hears_in_evaluation: int | None = None
    """The slot that learns of a loss at the end of that, when the others of its replica are past it."""
    slow_to_leave: int = 0
    """The section whose vote slots 1 and 2 are slow to leave: they wait in it when they learn of a loss."""
    hear_at: tuple[str, int, int] | None = None
    """Where the others learn of a loss, outside of collectives: the fault point, the step, and its micro-batch."""

    @property
    def replicas(self) -> int:
        return self.ranks // self.tp

    @property
    def samples(self) -> int:
        """In the data set: so many that all steps are taken in the turns that there are; the last steps of a turn may
        have a part of theirs in the next one."""
        return -(-self.steps * self.replicas * self.each * self.micro // self.epochs)

    @property
    def config(self) -> dict[str, Any]:
        """The config as in a `ds_config.json`."""
        adam = {"lr": RATE, "eps": 1e-4, "weight_decay": 0.01, "torch_adam": not self.fused_adam}
        return {
            # AutoTP's slots of a replica are all counted
            "train_batch_size": (self.replicas if self.mpu else self.ranks) * self.each * self.micro,
            "train_micro_batch_size_per_gpu": self.micro,
            "gradient_accumulation_steps": self.each,
            # DeepSpeed takes norms in float32, by which a clipped gradient is off by as much.
            "gradient_clipping": 0.0 if self.dtype == "float64" else 0.5,
            "steps_per_print": 1_000_000,
            "optimizer": {"type": "AdamW", "params": adam},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": RATE}},
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": 500,
                "reduce_scatter": self.dtype != "float64",  # ZeRO-2 and ZeRO-3 refuse to, in float64
                **(SMALL if self.stage > 2 else {}),
                **json.loads(self.zero),
            },
            "zero_force_ds_cpu_optimizer": not self.torch_adam_offloaded,
            "ntp": {"enabled": self.enabled, **dict(self.ntp)},
            **({HALVES[self.dtype]: {"enabled": True}} if self.dtype in HALVES else {}),
            **(
                {"tensor_parallel": {"autotp_size": self.tp} | ({} if self.transformer else CUT)}
                if self.tp > 1 and not self.mpu
                else {}
            ),
            **dict(self.more),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """Results of one rank."""

    weights: dict[str, Any]
    losses: dict[int, list[float]]
    """Step -> of its micro-batches, as the loop computed them."""
    norms: dict[int, float]
    rates: list[float]
    steps: int
    samples: int
    epoch: int
    members: int
    places: dict[str, Any]
    """Of what is cut: by which dim, and which of it this rank has."""
    kept: int
    """How many elements its optimizer keeps averages of."""


type Rows = list[list[Any]]


def have_deepspeed_imported() -> None:
    """Make the fork server import Megatron before the first rank: later it reads no environment. Megatron's fusions are
    compiled at import by default, and compiled they are not exact: a run in float64 is then 5e-8 from one without."""
    os.environ.setdefault("NTP_PRELOAD", "deepspeed")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def run(
    job: Job,
    *,
    faults: Sequence[Fault] = (),
    back: Mapping[int, int] | None = None,
    before_admission: Mapping[int, int] | None = None,
    leaving: Sequence[int] = (),
    play: Callable[..., Any] | None = None,
) -> tuple[dict[int, Seen], Rows]:
    """Results of the surviving ranks, and which rank computed what: ["micro", step, epoch, loss, samples...]. `back`:
    slots that restart after their death, and the step at which the others wait until they ask; `before_admission`: the
    step at which they wait until these are about to ask."""
    have_deepspeed_imported()
    back = back or {}
    return played(
        job.ranks,
        (play or Play)(job, asking_of(back, before_admission)),
        faults=faults,
        fault_points=FAULT_POINTS,
        back=back,
        leaving=leaving,
    )


@functools.cache
def undisturbed(job: Job) -> dict[int, Seen]:
    """The reference run: the same job by DeepSpeed alone."""
    return run(dataclasses.replace(job, enabled=False))[0]


@dataclasses.dataclass(frozen=True)
class Play:
    """The program of a rank, in a process of its own."""

    job: Job
    asking: Asking = dataclasses.field(default_factory=Asking)

    def __call__(self, rank: Rank) -> Seen:
        return quietly(rank.slot, functools.partial(self._play, rank))

    def _play(self, rank: Rank) -> Seen:
        folders = {"NTP_COPIES": self.job.copies, "NTP_RESUME": self.job.resumes}
        os.environ |= rank.environment() | {name: folder for name, folder in folders.items() if folder}
        import ntp_plugin.deepspeed.activation as ours  # noqa: PLC0415  (only ranks have DeepSpeed with hooks in it)

        if self.job.dtype == "float64":
            emulate_in_float64()
        if self.job.fused_adam not in ("", "own"):
            fused_adam.install(refused=self.job.fused_adam == "refused")
        gpu_optimizers.install()
        seen = _Loop(self.job, rank, self.asking).train()
        ours.end()
        return seen


def emulate_in_float64() -> None:
    """Make DeepSpeed reduce gradients and keep ZeRO's state in float64; by itself it uses float32 at most. So any
    difference beyond the rounding of float64 is a fault."""
    import deepspeed  # noqa: PLC0415
    from deepspeed.accelerator import get_accelerator  # noqa: PLC0415
    from deepspeed.runtime.zero import stage3, stage_1_and_2  # noqa: PLC0415

    accelerator = get_accelerator()
    types = accelerator.supported_dtypes()
    accelerator.supported_dtypes = lambda: [*types, torch.float64]
    deepspeed.DeepSpeedEngine.communication_data_type = property(lambda _: torch.float64)
    types_of = deepspeed.DeepSpeedEngine.get_data_types
    deepspeed.DeepSpeedEngine.get_data_types = lambda engine: (
        (torch.float64, torch.float64) if engine.zero_optimization_stage() else types_of(engine)
    )
    for zero in (stage_1_and_2.DeepSpeedZeroOptimizer, stage3.DeepSpeedZeroOptimizer_Stage3):
        zero.master_weights_and_grads_dtype = property(lambda _: torch.float64, lambda *_: None)


def weights_of(engine: Any) -> dict[str, Any]:
    """The weights of a rank; all ranks call this together with ZeRO-3, which gathers them."""
    import deepspeed  # noqa: PLC0415

    module, is_sharded = engine.module, engine.zero_optimization_stage() > 2
    if is_sharded:
        engine.empty_partition_cache()  # after an evaluation some are still prefetched
    with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=is_sharded):
        return {name: value.detach().double().numpy().copy() for name, value in module.named_parameters()}


class _Loop:
    """The user's script."""

    def __init__(self, job: Job, rank: Rank, asking: Asking) -> None:
        import deepspeed  # noqa: PLC0415

        self._job, self._rank, self._asking = job, rank, asking
        dtype: torch.dtype = getattr(torch, job.dtype)
        of_model = torch.float32 if job.dtype in HALVES else dtype
        self.mpu = Mpu(job.tp) if job.mpu else None
        if job.zero_init:
            deepspeed.init_distributed()
        sharded = deepspeed.zero.Init(config_dict_or_path=job.config) if job.zero_init else contextlib.nullcontext()
        with sharded:
            self.model = self._make_model(of_model)
        if job.unlike and rank.slot == 1:
            dict(self.model.named_parameters())["norm.weight"].data[3] += 1
        if job.frozen:
            dict(self.model.named_parameters())[job.frozen].requires_grad_(False)
        given = [one for one in self.model.parameters() if one.requires_grad or not job.transformer]
        decayed = [parameter for parameter in given if parameter.ndim > 1]
        others = [parameter for parameter in given if parameter.ndim == 1]
        groups: list[Any] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        groups = groups if others else decayed
        samples: Any
        samples = self._samples = Tokens(job.samples) if job.transformer else Samples(job.samples, dtype)
        self.engine, _, self.loader, _ = deepspeed.initialize(
            model=self.model,
            model_parameters=groups,
            training_data=None if job.own_loader else samples,
            config=job.config,
            mpu=self.mpu,
        )
        if job.own_loader:
            self._sampler: Any = DistributedSampler(samples, job.replicas, rank.slot // job.tp, seed=3)
            self.loader = DataLoader(samples, batch_size=job.micro, sampler=self._sampler)
        elif job.unfollowed:
            self._evaluate(DataLoader(samples, sampler=DistributedSampler(samples, job.ranks, rank.slot)))
            self.loader = DataLoader(samples, batch_size=job.micro, shuffle=True)
        else:
            self.loader.num_local_io_workers, self.loader.pin_memory = 0, False
        self._losses: dict[int, list[float]] = {}
        self._norms: dict[int, float] = {}
        if job.enabled:
            report_fault_points(rank, self.engine, job, asking)

    def _make_model(self, dtype: torch.dtype) -> torch.nn.Module:
        job = self._job
        if self.mpu is not None:
            return Own(self.mpu).to(dtype)
        if job.transformer:
            return make_transformer(job.transformer)
        return make_model(dtype, job.dropout, cut=job.tp > 1 or job.pair)

    @torch.no_grad()
    def _evaluate(self, loader: Any) -> None:
        for number, (_, x, _) in enumerate(loader):
            (self.engine if number % 2 else self.model)(x)

    def train(self) -> Seen:
        engine = self.engine
        if self._job.loads:
            engine.load_checkpoint(self._job.folder, tag="one")
            kept = next(iter(engine.basic_optimizer.state.values()))
            self._rank.write([["loaded", self._rank.slot, int(kept["step"])]])
            return self._seen()
        if self._job.evaluates == 0:
            self._go_forward_only(next(iter(DataLoader(self._samples, batch_size=self._job.micro)))[1])
        for epoch in range(self._first_turn(), self._job.epochs):
            if self._job.own_loader:
                self._sampler.set_epoch(epoch)
            for numbers, x, y in self.loader:
                before = engine.global_steps
                self._reached("forward")
                loss = self._loss(x, y)
                if self._job.tp > 1 and self._job.dropout and self._is_fresh:
                    self._rank.write([["drawn", before + 1, self._rank.slot, self._epoch, torch.rand(()).item()]])
                self._reached("backward")
                repeats = self._repeats
                engine.backward(loss)
                if self._job.enabled and self._counts and not repeats:
                    self._rank.write([["micro", before + 1, self._epoch, float(loss.detach()), *numbers.tolist()]])
                self._reached("accumulated")
                engine.step()
                self._losses.setdefault(before + 1, []).append(float(loss.detach()))
                if engine.global_steps == before + 1:  # after a loss it may be one less
                    self._norms[engine.global_steps] = float(engine.get_global_grad_norm() or 0)
                    self._reached("between")
                    if self._job.calls:
                        getattr(engine, self._job.calls[0])(*self._job.calls[1:])
                    self._pause(x)
                if self._job.saves_each and engine.global_steps and engine.global_steps % self._job.saves_each == 0:
                    self._save(f"step{engine.global_steps}")
            self._end_turn(epoch)
        return self._seen()

    def _weights(self) -> dict[str, Any]:
        of = f" of {self._rank.slot % self._job.tp}" * self._job.mpu
        return {name + of: value for name, value in weights_of(self.engine).items()}

    def _seen(self) -> Seen:
        engine = self.engine
        return Seen(
            weights=self._weights(),
            losses=self._losses,
            norms=self._norms,
            rates=engine.get_lr(),
            steps=engine.global_steps,
            samples=engine.global_samples,
            epoch=self._epoch,
            members=torch.distributed.get_world_size(),
            places=places(self.model, self._job) if self._job.tp > 1 and not self._job.mpu else {},
            kept=sum(kept["exp_avg"].numel() for kept in engine.basic_optimizer.state.values() if "exp_avg" in kept),
        )

    def _loss(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        if self._job.transformer:
            return self.engine(input_ids=x, labels=x).loss
        return (self.engine(x).squeeze(-1) - y).square().mean()

    def _pause(self, x: torch.Tensor) -> None:
        """A pause of the script between steps."""
        evaluates = self.engine.global_steps == self._job.evaluates
        if evaluates:
            self._go_forward_only(x)
        if self.engine.global_steps == self._job.saves_model:
            self._reached("save")
            self.engine.save_16bit_model(self._job.folder)
        if self.engine.global_steps == self._job.saves:
            self._save()
            if evaluates:
                self._go_forward_only(x)

    def _go_forward_only(self, x: torch.Tensor) -> None:
        self.engine.eval()
        for number in range(FORWARDS):
            if number == 1:
                self._reached("evaluation")
            with torch.no_grad():
                self._rank.write([["evaluated", number, float(self.engine(x).sum())]])
        self.engine.train()

    def _end_turn(self, epoch: int) -> None:
        if self._job.gathers_turns:
            one = torch.ones(1)
            torch.distributed.all_reduce(one)
            self._rank.write([["turn", epoch, self._rank.slot, int(one)]])
            weights = [parameter.detach().clone() for parameter in self.model.parameters()]
            if self._job.folder:
                torch.save(weights, Path(self._job.folder) / f"{self._rank.slot}-{epoch}.pt")
        if self._job.saves_turns:
            self._save(f"turn{epoch}", next_turn=epoch + 1)

    def _first_turn(self) -> int:
        if not self._job.goes_on:
            return 0
        path, noted = self.engine.load_checkpoint(self._job.folder)
        return int(noted["next_turn"]) if path else 0

    def _save(self, tag: str = "one", **noted: int) -> None:
        self._reached("save")
        folder = Path(self._job.folder or Path(self._rank.folder) / "checkpoints")
        self.engine.save_checkpoint(str(folder), tag=tag, client_state=noted)
        if (folder / tag).exists():  # not where the step that it was to be of is taken again
            self._rank.write([["saved", sorted(path.name for path in (folder / tag).iterdir())]])
        model = folder / tag / "mp_rank_00_model_states.pt"
        if self.engine.save_non_zero_checkpoint and model.exists():
            shards = torch.load(model, weights_only=False)["dp_world_size"]
            self._rank.write([["writes", self._rank.slot, shards]])

    def _reached(self, fault_point: str) -> None:
        if self._job.enabled:
            step = self.engine.global_steps + (fault_point not in ("between", "save", "evaluation"))
            self._rank.reached(fault_point, step)
            self._hear(fault_point, step)

    def _hear(self, fault_point: str, step: int) -> None:
        from ntp_plugin.deepspeed.job import DeepSpeedJob  # noqa: PLC0415

        job = DeepSpeedJob.now
        assert job is not None, "the engine is one that can lose ranks"
        if (fault_point, step, job.window._done) == self._job.hear_at and not self._epoch:
            wait_for_a_loss(job)

    @property
    def _is_fresh(self) -> bool:
        from ntp_plugin.deepspeed.job import DeepSpeedJob  # noqa: PLC0415

        assert DeepSpeedJob.now is not None, "the engine is one that can lose ranks"
        return not DeepSpeedJob.now.window._stale

    @property
    def _counts(self) -> bool:
        from ntp_plugin.deepspeed.job import DeepSpeedJob  # noqa: PLC0415

        assert DeepSpeedJob.now is not None, "the engine is one that can lose ranks"
        return self._is_fresh and DeepSpeedJob.now.window.replicas.is_replica_leader

    @property
    def _repeats(self) -> bool:
        from ntp_plugin.deepspeed.job import DeepSpeedJob  # noqa: PLC0415

        return self._job.stage > 2 and DeepSpeedJob.now is not None and DeepSpeedJob.now.window.repeats

    @property
    def _epoch(self) -> int:
        from ntp_plugin.deepspeed.job import DeepSpeedJob  # noqa: PLC0415

        return DeepSpeedJob.now.rank.groups.epoch if DeepSpeedJob.now is not None else 0


def places(model: torch.nn.Module, job_of: Job) -> dict[str, tuple[int, list[int]]]:
    """Places of this rank's parts of cut parameters in the full ones."""
    from ntp_plugin.deepspeed.job import DeepSpeedJob  # noqa: PLC0415

    if job_of.enabled:
        assert DeepSpeedJob.now is not None, "the engine is one that can lose ranks"
        cut: Any = DeepSpeedJob.now.window.replicas
        tensors = [tensor for tensor, _ in cut._nominal.units.stages[0].tensors if tensor.family]
        held = {
            tensor.name: (tensor.dim, tensor.local_index(cut._plan.units_of(tensor, cut._slot))) for tensor in tensors
        }
        return {
            name: (dim, [place for start, stop in spans for place in range(start, stop)])
            for name, (dim, spans) in held.items()
        }
    found = {}
    for name, layer in model.named_modules():
        if hasattr(layer, "_partition_sizes"):
            first = sum(layer._partition_sizes[: layer.tp_index])
            mine = list(range(first, first + layer._partition_sizes[layer.tp_index]))
            rows = type(layer).__name__ != "LinearAllreduce"
            found[f"{name}.weight"] = (0 if rows else 1, mine)
            if rows and layer.bias is not None:
                found[f"{name}.bias"] = (0, mine)
    return found
