"""A live run of a DeepSpeed job in ranks of the harness: as `ntp run` would start it, and some ranks die."""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.rehearsal import Asking, asking_of, played, quietly, tells_that_it_asks, wait_until_they_ask
from ntp_plugin.errors import PeerLost
from ntp_plugin.testing.faults import Fault
from ntp_plugin.testing.ranks import Rank

MOMENTS = (
    *("forward", "backward", "accumulated", "reduce", "vote", "apply", "applied", "gather", "between", "save"),
    *("within", "gradient", "evaluation"),
    *("report", "plan", "regroup", "stand on", "rolled", "stood"),
)
STEPS, FEATURES, RATE = 20, 8, 1e-2
VOCABULARY, LENGTH = 60, 10
HALVES = {"bfloat16": "bf16", "float16": "fp16"}
"""Dtypes that DeepSpeed trains in with masters in float32."""
CUT = {
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r".*up\.weight$"], "partition_type": "column"},
            {"patterns": [r".*down\.weight$"], "partition_type": "row"},
        ],
    }
}
"""As AutoTP is told what to cut."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One run: a small model that a loop of its own trains through DeepSpeed."""

    stage: int = 0
    ranks: int = 4
    tp: int = 1
    """Slots of a replica, cut by AutoTP."""
    pair: bool = False
    """The model that is cut where `tp` is more, whatever it is."""
    transformer: str = ""
    """One of transformers in place of a few layers: llama is cut by its plan, opt by AutoTP's own rules; a tied llama's
    vocabulary is cut as well."""
    each: int = 2
    """Micro-batches of a replica in a step."""
    micro: int = 2
    steps: int = STEPS
    epochs: int = 5
    dtype: str = "float64"
    enabled: bool = True
    ntp: tuple[tuple[str, Any], ...] = ()
    more: tuple[tuple[str, Any], ...] = ()
    dropout: float = 0.0
    own_loader: bool = False
    """The script makes its loader, and shuffles anew in each turn."""
    unfollowed: bool = False
    """The script trains on a loader that nobody can follow, after an evaluation by one that could be."""
    saves: int = 0
    """The step after which it writes a checkpoint."""
    calls: tuple[Any, ...] = ()
    """A method of the engine that the loop calls after each step, and with what."""
    unlike: bool = False
    """Slot 1 begins with another weight in what all slots have."""
    evaluates: int = 0
    """The step after which it goes forward three times without training."""
    slow_to_leave: int = 0
    """The section whose vote slots 1 and 2 are slow to leave: they stand in it when they hear of a loss."""
    hear_at: tuple[str, int, int] | None = None
    """Where the others are when they hear of a loss, in no collective: the moment, the step, and its micro-batch."""

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
        """As a `ds_config.json` has it."""
        adam = {"lr": RATE, "eps": 1e-4, "weight_decay": 0.01, "torch_adam": True}
        return {
            "train_batch_size": self.ranks * self.each * self.micro,  # DeepSpeed counts slots of a replica, too
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
                "reduce_scatter": self.dtype != "float64",  # ZeRO-2 refuses to, in float64
            },
            "ntp": {"enabled": self.enabled, **dict(self.ntp)},
            **({HALVES[self.dtype]: {"enabled": True}} if self.dtype in HALVES else {}),
            **(
                {"tensor_parallel": {"autotp_size": self.tp} | ({} if self.transformer else CUT)} if self.tp > 1 else {}
            ),
            **dict(self.more),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank saw."""

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


type Rows = list[list[Any]]


def have_deepspeed_imported() -> None:
    """Have the server that ranks are forked from import it, before its first rank: later it reads no environment."""
    os.environ.setdefault("NTP_PRELOAD", "deepspeed")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def run(
    job: Job,
    *,
    faults: Sequence[Fault] = (),
    back: Mapping[int, int] | None = None,
    leaving: Sequence[int] = (),
    play: Callable[..., Any] | None = None,
    timeout_s: float = 120.0,
) -> tuple[dict[int, Seen], Rows]:
    """What the ranks saw that were left, and who computed what: ["micro", step, epoch, loss, samples...].

    `back`: slots that start again once they are dead, and the step at which the others wait until they ask.
    """
    have_deepspeed_imported()
    back = back or {}
    return played(
        job.ranks,
        (play or Play)(job, asking_of(back)),
        faults=faults,
        moments=MOMENTS,
        back=back,
        leaving=leaving,
        timeout_s=timeout_s,
    )


@functools.cache
def undisturbed(job: Job) -> dict[int, Seen]:
    """The twin: the same job by DeepSpeed alone."""
    return run(dataclasses.replace(job, enabled=False))[0]


class Samples(torch.utils.data.Dataset[Any]):
    """Numbers, and what is to be learnt of them; a sample is drawn from its number."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self._count, self._dtype = count, dtype

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Any:
        x = torch.randn(FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        return number, x.to(self._dtype), x.sin().sum().to(self._dtype)


class Tokens(torch.utils.data.Dataset[Any]):
    """For a language model."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Any:
        generator = torch.Generator().manual_seed(number)
        return number, torch.randint(0, VOCABULARY, (LENGTH,), generator=generator), 0


class Cut(torch.nn.Module):
    """Two layers that are a pair, between others that all slots have."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(dropout)
        self.enter, self.up = torch.nn.Linear(FEATURES, 12), torch.nn.Linear(12, 24)
        self.down, self.norm, self.out = torch.nn.Linear(24, 12), torch.nn.LayerNorm(12), torch.nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.enter(x))
        out: torch.Tensor = self.out(self.norm(x + self.down(self.up(x).tanh())))
        return out


def make_transformer(kind: str) -> torch.nn.Module:
    """A small one."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  (it takes seconds)

    torch.manual_seed(7)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
    }
    shape |= {"max_position_embeddings": LENGTH}
    own: dict[str, Any] = {
        "llama": {"intermediate_size": 88, "num_key_value_heads": 4},
        "tied llama": {
            "intermediate_size": 88,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "pad_token_id": 33,
        },
        "opt": {"ffn_dim": 80, "word_embed_proj_dim": 48, "dropout": 0.0},
    }
    make: Any = AutoModelForCausalLM.from_config
    model: torch.nn.Module = make(AutoConfig.for_model(kind.rsplit(maxsplit=1)[-1], **shape, **own[kind]))
    return model


def make_model(dtype: torch.dtype, dropout: float, *, cut: bool = False) -> torch.nn.Module:
    """From one seed on all ranks."""
    torch.manual_seed(7)
    if cut:
        return Cut(dropout).to(dtype)
    layers = [torch.nn.Linear(FEATURES, 33), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(33, 17)]
    return torch.nn.Sequential(*layers, torch.nn.LayerNorm(17), torch.nn.Tanh(), torch.nn.Linear(17, 1)).to(dtype)


@dataclasses.dataclass(frozen=True)
class Play:
    """What a rank does, in a process of its own."""

    job: Job
    asking: Asking = dataclasses.field(default_factory=dict)

    def __call__(self, rank: Rank) -> Seen:
        return quietly(rank.slot, functools.partial(self._play, rank))

    def _play(self, rank: Rank) -> Seen:
        os.environ |= rank.environment()
        import ntp_plugin.deepspeed.activation as ours  # noqa: PLC0415  (only ranks have DeepSpeed with hooks in it)

        if self.job.dtype == "float64":
            rehearse_in_float64()
        seen = _Loop(self.job, rank, self.asking).train()
        ours.end()
        return seen


def rehearse_in_float64() -> None:
    """DeepSpeed reduces gradients, and keeps what ZeRO steps, in float32 at most. In a rehearsal it does so in float64,
    so that what differs by more than its rounding is a fault."""
    import deepspeed  # noqa: PLC0415
    from deepspeed.accelerator import get_accelerator  # noqa: PLC0415
    from deepspeed.runtime.zero import stage_1_and_2  # noqa: PLC0415

    accelerator, zero = get_accelerator(), stage_1_and_2.DeepSpeedZeroOptimizer
    types = accelerator.supported_dtypes()
    accelerator.supported_dtypes = lambda: [*types, torch.float64]
    deepspeed.DeepSpeedEngine.communication_data_type = property(lambda _: torch.float64)
    types_of = deepspeed.DeepSpeedEngine.get_data_types
    deepspeed.DeepSpeedEngine.get_data_types = lambda engine: (
        (torch.float64, torch.float64) if engine.zero_optimization_stage() else types_of(engine)
    )
    zero.master_weights_and_grads_dtype = property(lambda _: torch.float64, lambda *_: None)


class _Loop:
    """The user's script."""

    def __init__(self, job: Job, rank: Rank, asking: Asking) -> None:
        import deepspeed  # noqa: PLC0415

        self._job, self._rank, self._asking = job, rank, asking
        dtype: torch.dtype = getattr(torch, job.dtype)
        self.model = (
            make_transformer(job.transformer)
            if job.transformer
            else make_model(torch.float32 if job.dtype in HALVES else dtype, job.dropout, cut=job.tp > 1 or job.pair)
        )
        if job.unlike and rank.slot == 1:
            dict(self.model.named_parameters())["norm.weight"].data[3] += 1
        decayed = [parameter for parameter in self.model.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in self.model.parameters() if parameter.ndim == 1]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        samples: Any = Tokens(job.samples) if job.transformer else Samples(job.samples, dtype)
        self.engine, _, self.loader, _ = deepspeed.initialize(
            model=self.model,
            model_parameters=groups,
            training_data=None if job.own_loader else samples,
            config=job.config,
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
            tell_moments(rank, self.engine, job, asking)

    @torch.no_grad()
    def _evaluate(self, loader: Any) -> None:
        for number, (_, x, _) in enumerate(loader):
            (self.engine if number % 2 else self.model)(x)

    def train(self) -> Seen:
        engine = self.engine
        for epoch in range(self._job.epochs):
            if self._job.own_loader:
                self._sampler.set_epoch(epoch)
            for numbers, x, y in self.loader:
                before = engine.global_steps
                self._reached("forward")
                loss = self._loss(x, y)
                if self._job.tp > 1 and self._job.dropout and self._is_fresh:
                    self._rank.write([["drawn", before + 1, self._rank.slot, self._epoch, torch.rand(()).item()]])
                self._reached("backward")
                engine.backward(loss)
                if self._job.enabled and self._counts:
                    self._rank.write([["micro", before + 1, self._epoch, float(loss.detach()), *numbers.tolist()]])
                self._reached("accumulated")
                engine.step()
                self._losses.setdefault(before + 1, []).append(float(loss.detach()))
                if engine.global_steps == before + 1:  # after a loss it may be one less
                    self._norms[engine.global_steps] = float(engine.get_global_grad_norm() or 0)
                    self._reached("between")
                    if self._job.calls:
                        getattr(engine, self._job.calls[0])(*self._job.calls[1:])
                    if engine.global_steps == self._job.saves:
                        self._save()
                    if engine.global_steps == self._job.evaluates:
                        self._go_forward_only(x)
        return Seen(
            weights={name: value.detach().double().numpy().copy() for name, value in self.model.named_parameters()},
            losses=self._losses,
            norms=self._norms,
            rates=engine.get_lr(),
            steps=engine.global_steps,
            samples=engine.global_samples,
            epoch=self._epoch,
            members=torch.distributed.get_world_size(),
            places=places(self.model, self._job) if self._job.tp > 1 else {},
        )

    def _loss(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        if self._job.transformer:
            return self.engine(input_ids=x, labels=x).loss
        return (self.engine(x).squeeze(-1) - y).square().mean()

    def _go_forward_only(self, x: torch.Tensor) -> None:
        self.engine.eval()
        for number in range(3):
            if number == 1:
                self._reached("evaluation")
            with torch.no_grad():
                self._rank.write([["evaluated", number, float(self.engine(x).sum())]])
        self.engine.train()

    def _save(self) -> None:
        self._reached("save")
        folder = Path(self._rank.folder) / "checkpoints"
        self.engine.save_checkpoint(str(folder), tag="one")
        if (folder / "one").exists():  # not where the step that it was to be of is taken again
            self._rank.write([["saved", sorted(path.name for path in (folder / "one").iterdir())]])
        model = folder / "one/mp_rank_00_model_states.pt"
        if self.engine.save_non_zero_checkpoint and model.exists():
            shards = torch.load(model, weights_only=False)["dp_world_size"]
            self._rank.write([["writes", self._rank.slot, shards]])

    def _reached(self, moment: str) -> None:
        if self._job.enabled:
            step = self.engine.global_steps + (moment not in ("between", "save", "evaluation"))
            self._rank.reached(moment, step)
            self._hear(moment, step)

    def _hear(self, moment: str, step: int) -> None:
        from ntp_plugin.deepspeed.job import LiveJob  # noqa: PLC0415

        job = LiveJob.now
        assert job is not None, "the engine is one that can lose ranks"
        if (moment, step, job.window._done) == self._job.hear_at and not self._epoch:
            hear_of_a_loss(job)

    @property
    def _is_fresh(self) -> bool:
        from ntp_plugin.deepspeed.job import LiveJob  # noqa: PLC0415

        assert LiveJob.now is not None, "the engine is one that can lose ranks"
        return not LiveJob.now.window._stale

    @property
    def _counts(self) -> bool:
        from ntp_plugin.deepspeed.job import LiveJob  # noqa: PLC0415

        assert LiveJob.now is not None, "the engine is one that can lose ranks"
        cut = LiveJob.now.window.cut
        return self._is_fresh and (cut is None or cut.speaks)

    @property
    def _epoch(self) -> int:
        from ntp_plugin.deepspeed.job import LiveJob  # noqa: PLC0415

        return LiveJob.now.rank.groups.epoch if LiveJob.now is not None else 0


def places(model: torch.nn.Module, job_of: Job) -> dict[str, tuple[int, list[int]]]:
    """Where this rank's parts of cut parameters are in the whole ones."""
    from ntp_plugin.deepspeed.job import LiveJob  # noqa: PLC0415

    if job_of.enabled:
        assert LiveJob.now is not None and LiveJob.now.window.cut is not None, "it is cut"
        cut = LiveJob.now.window.cut
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


def tell_moments(rank: Rank, engine: Any, job_of: Job, asking: Asking) -> None:
    """Tell the rank of every moment at which a fault may strike: of a step by its number, of a walk by its epoch."""
    from deepspeed.runtime.zero import stage_1_and_2  # noqa: PLC0415

    from ntp_plugin.deepspeed.job import LiveJob  # noqa: PLC0415

    job = LiveJob.now
    assert job is not None, "the engine is one that can lose ranks"
    driver: Any = job.loop.driver

    def tells(owner: Any, name: str, before: str | None, after: str | None = None, *, walks: bool = False) -> None:
        original = getattr(owner, name)

        def told(*args: Any, **kwargs: Any) -> Any:
            where: dict[str, Any] = (
                {"epoch": driver._agreement.member.view.epoch} if walks else {"step": job.loop.done + 1}
            )
            if before:
                rank.reached(before, **where)
            result = original(*args, **kwargs)
            if after:
                rank.reached(after, **where)
            return result

        setattr(owner, name, told)

    if job_of.hear_at and job_of.hear_at[0] == "words" and all(fault.slot != rank.slot for fault in rank.faults):
        _hear_before_the_vote(job, job_of.hear_at[1])
    if job_of.slow_to_leave and rank.slot in (1, 2):
        _be_slow_to_leave(job, job_of.slow_to_leave)
    tells(engine, "allreduce_gradients", "reduce")
    if job_of.tp > 1:
        row = next(layer for layer in engine.module.modules() if type(layer).__name__ == "LinearAllreduce")
        tells(row, "forward", "within")
        row.weight.register_hook(lambda _: rank.reached("gradient", job.loop.done + 1))
    tells(job.loop, "vote", "vote")
    tells(job.loop, "apply", "apply", "applied")
    tells(stage_1_and_2, "all_gather_dp_groups", "gather")
    if not rank.joining:
        tells(driver, "_report", "report", walks=True)
        tells(job.trainer, "plan", "plan", walks=True)
        tells(job.loop, "roll_forward", None, "rolled", walks=True)
        tells(driver, "_regroup", "regroup", walks=True)
        tells(job.trainer, "stand_on", "stand on", "stood", walks=True)
    _wait_for_those_who_come_back(rank, job, asking)


def hear_of_a_loss(job: Any) -> None:
    """Wait for it, and go on as one who has looked at nothing."""
    with contextlib.suppress(PeerLost):
        while True:
            job.rank.groups.check()
            time.sleep(0.001)


def _hear_before_the_vote(job: Any, step: int) -> None:
    original = job.window._words

    def words() -> Any:
        if job.loop.done + 1 == step and not job.rank.groups.epoch:
            hear_of_a_loss(job)
        return original()

    job.window._words = words


def _be_slow_to_leave(job: Any, section: int) -> None:
    original = job.loop._sum

    def summed(numbers: Any) -> Any:
        found = original(numbers)
        while job.loop.done + 1 == section and not job.rank.groups.epoch:
            job.rank.groups.check()
            time.sleep(0.001)
        return found

    job.loop._sum = summed


def _wait_for_those_who_come_back(rank: Rank, job: Any, asking: Asking) -> None:
    begin = job.window._take_in_hand

    def wait_and_begin() -> None:
        wait_until_they_ask(rank, asking, lambda: job.window.step + 1, lambda: None)
        begin()

    job.window._take_in_hand = wait_and_begin
    job.rank.wait_to_be_let_in = tells_that_it_asks(rank, job.rank.wait_to_be_let_in)
