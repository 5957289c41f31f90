"""Run Megatron's own pretrain, by a recipe, in ranks of the harness, and compare two runs."""

import dataclasses
import functools
import hashlib
import os
import runpy
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ntp_plugin.config.sections import Parallel
from ntp_plugin.megatron.te_emulation import importing
from ntp_plugin.planning.topology import Topology, parse_slots
from ntp_plugin.testing.ranks import Rank, Ranks
from tests.harness.parity import group_adam
from tests.harness.played_ranks import quietly

RECIPES = Path(__file__).parents[3] / "recipes/megatron"
STEPS = 20
OVERFLOWS = (3, 4, 6)
"""Steps whose gradients do not fit, if a test makes them infinite."""
COLLECTIVES = (
    *("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_gather", "barrier"),
    "all_to_all_single",
)
COMMON = f"""
--hidden-size 64 --num-attention-heads 16 --kv-channels 4 --ffn-hidden-size 160
--vocab-size 250 --make-vocab-size-divisible-by 32 --tokenizer-type NullTokenizer --mock-data --num-workers 0
--seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --train-iters {STEPS}
--lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.01 --clip-grad 0.5
--attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --eval-interval 1000 --log-interval 1
--transformer-impl local --distributed-backend gloo --use-cpu-initialization --attention-backend unfused
--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
--no-gradient-accumulation-fusion --no-persist-layer-norm
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One run: the model, the layout, and the planted fault."""

    model: str
    tp: int
    dp: int = 1
    pp: int = 1
    cp: int = 1
    layers: int = 0
    """0: one for each stage, but at least two."""
    chunks: int = 1
    """Virtual stages on each rank."""
    batch: int = 6
    schedule: str = ""
    """Instead of `batch`: sizes as `--step-batch-size-schedule` has them, for a job of `samples` samples."""
    samples: int = 0
    masked: bool = True
    """Whether samples have different numbers of tokens that count."""
    lost: tuple[str, ...] = ()
    enabled: bool = False
    dtype: str = "float64"
    eps: str = "1e-4"
    more: str = ""
    left_out: frozenset[str] = frozenset()
    """Flags that the command line does not give, nor their values."""
    route: str = "direct"
    copies: str = ""
    """A folder for them that outlives the ranks."""
    per_host: int = 0
    """Ranks that believe to share a host; 0: all."""
    under: str = ""
    """A condition (`conditions.py`)."""
    spoil: str = ""
    """A negative control (`spoilt.py`)."""
    group_adam: bool = False
    """Whether Adam is one that counts its steps group by group."""

    @property
    def processes(self) -> int:
        topology = Topology.of(Parallel(tp=self.tp, cp=self.cp, pp=self.pp, dp=self.dp))
        return topology.size - len(parse_slots(self.lost, topology))

    @property
    def recipe(self) -> Path:
        """The pattern is the sole sign of a hybrid model, to Megatron as well."""
        return RECIPES / ("pretrain_hybrid.py" if "--hybrid-layer-pattern" in self.model else "pretrain_gpt.py")

    @property
    def words(self) -> list[str]:
        """The command line."""
        plugin = ["--ntp-enable"] if self.enabled or self.lost else []
        plugin += [f"--ntp-lost={word}" for word in self.lost]
        plugin += [f"--ntp-route={self.route}"] if self.lost else []
        parallel = ["--tensor-model-parallel-size", str(self.tp), "--pipeline-model-parallel-size", str(self.pp)]
        layers = self.layers or max(2, self.pp * self.chunks)
        parallel += ["--num-layers", str(layers), "--adam-eps", self.eps]
        parallel += ["--context-parallel-size", str(self.cp)] if self.cp > 1 else []
        if self.chunks > 1 and "|" not in self.model:
            parallel += ["--num-virtual-stages-per-pipeline-rank", str(self.chunks)]
        common = COMMON.replace("--mock-data", "") if "--data-path" in self.more else COMMON
        batch = f"--global-batch-size {self.batch}"
        if self.schedule:  # Megatron's count of iterations would depend on the number of replicas
            common = common.replace(f"--train-iters {STEPS}", "").replace("--lr-warmup-iters 2", "")
            batch = f"--step-batch-size-schedule {self.schedule} --train-samples {self.samples} --lr-warmup-samples 6"
        words = [*common.split(), *batch.split(), *self.model.split(), *parallel, *plugin, *self.more.split()]
        return list(without(words, self.left_out))


def without(words: Sequence[str], flags: Collection[str]) -> Iterator[str]:
    """The words of a command line, without some flags and the values behind them."""
    drops = False
    for word in words:
        drops = word in flags or (drops and not word.startswith("--"))
        if not drops:
            yield word


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A rank's part of a parameter: its place in the full parameter, along one dim."""

    values: NDArray[np.float64]
    shape: tuple[int, ...]
    dim: int
    index: NDArray[np.int64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """Results of one rank."""

    replica: int
    expert_group: int
    losses: list[float]
    """On ranks of the last stage."""
    steps_with_loss: list[int]
    """The steps that these are of: where layers move, a rank is of the last stage for some of them."""
    norms: list[float]
    """0 where the step was skipped."""
    rates: list[float]
    scales: list[float]
    """The loss scale after each step."""
    consumed: int
    fp8_scales: str
    """A digest of FP8's scales, at the end."""
    drawn_from: str
    """A digest of all generators of random numbers, at the end."""
    parts: dict[str, Part]
    collectives: dict[str, int]
    overlapped: int
    """How often a bucket's sums were under way before the backward had ended."""
    evaluated: list[float]
    """The losses of each pass over the validation set."""
    gathered_ahead: int
    """How often a module of the forward came to its bucket's parameters, and they had been on their way till then."""
    predicted: list[float]
    """Each step's losses of multi-token prediction, and how many of its predictions were right so far; on ranks of the
    last stage."""
    sent: dict[str, float]
    """Bytes of gradients, by the collective that `reduction/` issued, as a ring sends them."""
    route: Any
    """As planned, in a degraded layout."""
    share: tuple[int, int]
    """Micro-batches of a step, and samples in each; in a degraded layout."""
    counted: dict[str, int]
    """Bytes of all tensors that it holds: weights, gradients, optimizer."""
    planned: dict[str, int]
    """The same of the fullest slot of its group, as `planning/memory_fit.py` has it; in a degraded layout."""


_LOCAL = "megatron.training.training"
_WITH_TE, _WITH_TE_SINGLE = "tests.harness.parity.with_te", "tests.harness.parity.with_te_single"


def have_megatron_imported(words: Sequence[str] = (), *, dtype: str = "float64") -> None:
    """Make the fork server import Megatron before the first rank: later it reads no environment. Megatron's fusions are
    compiled at import by default, and compiled they are not exact: a run in float64 is then 5e-8 from one without.

    With TransformerEngine Megatron is another one from its import on, in either precision, so a server that has
    imported the other is ended.
    """
    with_te = _WITH_TE if dtype == "float64" else _WITH_TE_SINGLE
    before, wanted = os.environ.get("NTP_PRELOAD", ""), with_te if importing.is_wanted(words) else _LOCAL
    known = (_LOCAL, _WITH_TE, _WITH_TE_SINGLE)
    if before in known and before != wanted:
        server: Any = forkserver._forkserver
        server._stop()  # the next rank starts another
    if before in ("", *known):
        os.environ["NTP_PRELOAD"] = wanted
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


@functools.cache
def run(job: Job) -> dict[int, Seen]:
    """Run the job and return the results of every rank."""
    have_megatron_imported(job.words, dtype=job.dtype)
    with Ranks(job.processes, Play(job)) as ranks:
        return ranks.wait()


@dataclasses.dataclass(frozen=True)
class Play:
    """The program of a rank, in a process of its own."""

    job: Job

    def __call__(self, rank: Rank) -> Seen:
        """Run the recipe as `python -m ntp_plugin.megatron` would, and look on."""
        return quietly(rank.slot, functools.partial(self._play, rank))

    def _play(self, rank: Rank) -> Seen:
        os.environ |= {
            "RANK": str(rank.slot),
            "LOCAL_RANK": str(rank.slot),
            "WORLD_SIZE": str(self.job.processes),
            "LOCAL_WORLD_SIZE": str(self.job.processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(rank.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        from ntp_plugin.megatron import activation, cpu_emulation  # noqa: PLC0415  (only ranks know Megatron: it warns of much)

        mode = cpu_emulation.FLOAT64 if self.job.dtype == "float64" else cpu_emulation.ON
        cpu_emulation.install(mode, self.job.words)
        activation.install()
        looker = Looker(self.job)
        recipe = str(self.job.recipe)
        sys.argv = [recipe, *self.job.words, "--data-cache-path", f"{rank.folder}/samples"]
        sys.path[0] = str(RECIPES)
        run_script(recipe)
        return looker.seen()


def run_script(path: str) -> None:
    """Run the script as `python -m ntp_plugin.megatron` does, up to its end; a script may end itself early."""
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


class Looker:
    """Records each step, through functions that Megatron calls after it."""

    def __init__(self, job: Job) -> None:
        from megatron.core.datasets.gpt_dataset import MockGPTDataset  # noqa: PLC0415
        from megatron.training import training  # noqa: PLC0415

        self._job = job
        self._losses: list[float] = []
        self._steps_with_loss: list[int] = []
        self._norms: list[float] = []
        self._rates: list[float] = []
        self._scales: list[float] = []
        self._collectives = dict.fromkeys(COLLECTIVES, 0)
        self._chunks: list[Any] = []
        self._optimizer: Any = None
        self._overlapped = 0
        self._gathered_ahead = 0
        self._evaluated: list[float] = []
        self._predicted: list[float] = []
        self._sent = dict.fromkeys(COLLECTIVES, 0.0)
        self._watch_buckets()
        training.training_log = self._with_log(training.training_log)
        training.evaluate = self._with_evaluation(training.evaluate)
        logged = training.MTPLossLoggingHelper
        logged.track_mtp_metrics = staticmethod(self._with_predictions(logged.track_mtp_metrics))
        training.post_training_step_callbacks = self._with_step(training.post_training_step_callbacks)
        if job.masked:
            MockGPTDataset.__getitem__ = _with_masks(MockGPTDataset.__getitem__)
        for name in COLLECTIVES:
            setattr(torch.distributed, name, self._counted(name))
        if job.group_adam:
            group_adam.install()
        if job.under or job.spoil:
            from tests.harness.parity import conditions, spoilt, spoilt_experts, spoilt_layers  # noqa: PLC0415

            kinds = (spoilt_experts, spoilt_layers)
            planted = next((kind for kind in kinds if hasattr(kind, job.spoil or "-")), spoilt)
            for kind, name in ((conditions, job.under), (planted, job.spoil)):
                if name:
                    getattr(kind, name)()

    def _with_log(self, log: Any) -> Any:
        names = ("losses", "totals", "rate", "iteration", "scale", "flag", "skipped", "norm")

        def training_log(*args: Any, **kwargs: Any) -> Any:
            values = dict(zip(names, args, strict=False))
            losses = [float(loss) for name, loss in values["losses"].items() if name == "lm loss"]
            self._losses += losses
            self._steps_with_loss += [values["iteration"]] * len(losses)
            self._norms.append(float(values["norm"] or 0.0))
            self._rates.append(values["rate"])
            self._scales.append(float(values["scale"]))
            return log(*args, **kwargs)

        return training_log

    def _with_evaluation(self, evaluate: Any) -> Any:
        def evaluated(*args: Any, **kwargs: Any) -> Any:
            results = evaluate(*args, **kwargs)
            self._evaluated += [float(loss) for name, loss in results[0].items() if name == "lm loss"]
            return results

        return evaluated

    def _with_predictions(self, track: Any) -> Any:
        from megatron.training import training  # noqa: PLC0415

        @functools.wraps(track)
        def tracked(scale: float, iteration: int, writer: Any, wandb: Any, totals: Any) -> None:
            track(scale, iteration, writer, wandb, totals)
            self._predicted += [float(total) for name, total in totals.items() if name.startswith("mtp_")]
            right = training.MTPLossLoggingHelper.tracker.get("cumulative_correct_values")
            self._predicted += [] if right is None else right.tolist()

        return tracked

    def _with_step(self, callbacks: Any) -> Any:
        def after_step(model: Any, *args: Any, **kwargs: Any) -> Any:
            self._chunks, self._optimizer = model, args[0]
            if self._job.lost:
                self._sync.require_equal_units()
            return callbacks(model, *args, **kwargs)

        return after_step

    def _watch_buckets(self) -> None:
        from ntp_plugin.megatron.reduction.buckets import LaneBucketGroup  # noqa: PLC0415

        finish = LaneBucketGroup.finish_grad_sync

        def watched(group: Any, *args: Any, **kwargs: Any) -> None:
            self._overlapped += group.grad_reduce_handle is not None
            finish(group, *args, **kwargs)

        wait = LaneBucketGroup.finish_param_sync

        def watched_gather(group: Any, *args: Any, **kwargs: Any) -> None:
            in_forward = torch.is_grad_enabled()  # or else Megatron has everybody wait, to evaluate say
            self._gathered_ahead += in_forward and group.gathered[-1].on_its_way
            wait(group, *args, **kwargs)

        setattr(LaneBucketGroup, "finish_grad_sync", watched)  # noqa: B010  (a plain assignment is not for methods)
        setattr(LaneBucketGroup, "finish_param_sync", watched_gather)  # noqa: B010

    def _counted(self, name: str) -> Any:
        original = getattr(torch.distributed, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._collectives[name] += 1
            if sys._getframe(1).f_globals["__name__"].startswith("ntp_plugin.reduction."):
                self._sent[name] += bytes_sent(name, *args, **kwargs)
            return original(*args, **kwargs)

        return counted

    @property
    def _sync(self) -> Any:
        """The plugin's part that holds the lanes; None in the nominal layout."""
        return getattr(self._chunks[0].config.finalize_model_grads_func, "__self__", None)

    def seen(self) -> Seen:
        """Everything, at the end."""
        from megatron.core import parallel_state  # noqa: PLC0415
        from megatron.training import get_args  # noqa: PLC0415

        width = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
        return Seen(
            replica=parallel_state.get_data_parallel_rank(),
            expert_group=(
                self._sync._layout.expert_place.replica
                if self._sync and self._sync._layout.topology.expert_slots
                else parallel_state.get_expert_data_parallel_rank()
            ),
            losses=self._losses,
            steps_with_loss=self._steps_with_loss,
            norms=self._norms,
            rates=self._rates,
            scales=self._scales,
            consumed=get_args().consumed_train_samples,
            fp8_scales=_digest_of_scales(self._chunks),
            drawn_from=_digest_of_generators(),
            parts={_in_whole_model(name): part for name, part in self._parts(rank, width)},
            collectives=self._collectives,
            overlapped=self._overlapped,
            evaluated=self._evaluated,
            predicted=self._predicted,
            gathered_ahead=self._gathered_ahead,
            sent=self._sent,
            route=self._sync._job.plan.routes[0] if self._sync else None,
            share=(self._sync._job.share.count, self._sync._job.share.size) if self._sync else (0, 0),
            counted=self._counted_bytes(),
            planned=self._planned_bytes() if self._sync else {},
        )

    def _counted_bytes(self) -> dict[str, int]:
        from ntp_plugin.megatron.reduction.lane_sync import named  # noqa: PLC0415

        parameters = [parameter for _, parameter in named(self._chunks)]
        optimizers = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        states = [state for one in optimizers for state in one.optimizer.state.values()]
        kept = [value for state in states for value in state.values() if torch.is_tensor(value) and value.dim()]
        return {
            "weights": sum(parameter.nbytes for parameter in parameters),
            "gradients": sum(parameter.main_grad.nbytes for parameter in parameters),
            "optimizer": sum(value.nbytes for value in kept),
        }

    def _planned_bytes(self) -> dict[str, int]:
        from ntp_plugin.planning.memory_fit import memory_use  # noqa: PLC0415

        job = self._sync._job
        nominal, slot = job.plan.nominal, job.layout.slot
        surviving = nominal.surviving(job.layout.lost)
        use = memory_use(
            nominal.units.stages[slot.stage],
            nominal.topology.tp,
            surviving.pattern(slot.replica, slot.stage),
            dataclasses.replace(nominal.state, distributed_optimizer="--use-distributed-optimizer" in self._job.words),
            replicas=len(surviving.replicas),
            packing=False,
        )
        return {"weights": use.weights, "gradients": use.gradients, "optimizer": use.optimizer}

    def _parts(self, rank: int, width: int) -> Iterator[tuple[str, Part]]:
        from megatron.core import parallel_state  # noqa: PLC0415

        from ntp_plugin.megatron.reduction.lane_sync import named  # noqa: PLC0415

        for name, parameter in named(self._chunks):
            if not parameter.numel():  # of an idle rank
                continue
            values = parameter.detach().double().numpy()
            shape, dim = values.shape, 0
            ranges = [(0, shape[0])]
            if self._sync and self._sync.tensors[name].family:
                tensor = self._sync.tensors[name]
                shape, dim, ranges = tensor.shape, tensor.dim, list(tensor.local_index(self._sync.held()[name]))
            elif EXPERTS in name:  # each rank of an expert group has its own
                group = parallel_state.get_expert_tensor_and_model_parallel_group()
                ranges = [(group.rank() * shape[0], (group.rank() + 1) * shape[0])]
                shape = (shape[0] * group.size(), *shape[1:])
            elif parameter.tensor_model_parallel:
                dim, sections = parameter.partition_dim, self._sections(parameter)
                shape = (*shape[:dim], shape[dim] * width, *shape[dim + 1 :])
                starts = [start * width + rank * size for start, size in _placed(sections)]
                ranges = [(start, start + size) for start, size in zip(starts, sections, strict=True)]
            index = np.concatenate([np.arange(start, stop) for start, stop in ranges])
            yield name, Part(values=values, shape=shape, dim=dim, index=index)

    def _sections(self, parameter: Any) -> list[int]:
        """The sizes of the parts of a slot's tensor that are cut one by one, by Megatron's own modules."""
        for layer in (module for chunk in self._chunks for module in chunk.modules()):
            if hasattr(layer, "in_proj_split_sections"):  # a gated delta net: queries, keys, values, ...
                if parameter is layer.in_proj.weight:
                    return list(layer.in_proj_split_sections)
                if parameter is layer.conv1d.weight:
                    return list(layer.in_proj_split_sections[:3])
        stride = getattr(parameter, "partition_stride", 1)
        return [parameter.shape[parameter.partition_dim] // stride] * stride


def _in_whole_model(name: str) -> str:
    """A parameter's name in the whole model, whichever stage and virtual stage has it. A stage with multi-token
    prediction has another embedding."""
    from megatron.core import parallel_state  # noqa: PLC0415

    name = name.split(".", 1)[1] if name[0].isdigit() else name
    is_first = parallel_state.get_pipeline_model_parallel_rank() == 0
    return name if is_first or not name.startswith("embedding.") else f"of a later stage: {name}"


def _placed(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Each section's start in the slot's tensor, and its size."""
    return zip([0, *accumulate(sizes)], sizes, strict=False)


def _digest_of_generators() -> str:
    from ntp_plugin.megatron.live import generators  # noqa: PLC0415

    return hashlib.blake2b(repr(generators.states()).encode()).hexdigest()


def _digest_of_scales(chunks: list[Any]) -> str:
    from ntp_plugin.megatron.fp8_scales import scales_of  # noqa: PLC0415

    values = {name: tensor.tolist() for name, tensor in scales_of(chunks).items()}
    return hashlib.blake2b(repr(values).encode()).hexdigest() if values else ""


def bytes_sent(name: str, *args: Any, group: Any = None, **_: Any) -> float:
    """Bytes that a rank sends in a collective on a ring."""
    size, members = args[-1 if name != "all_to_all_single" else 1].nbytes, torch.distributed.get_world_size(group)
    rounds = {"all_reduce": 2 * (members - 1) / members, "reduce_scatter_tensor": (members - 1) / members}
    return float(size * ({"all_to_all_single": 1, "all_gather_into_tensor": members - 1} | rounds)[name])


def _with_masks(item: Any) -> Any:
    """Samples have different numbers of tokens that count, by their own number alone."""

    def masked(dataset: Any, index: Any) -> Any:
        sample = dict(item(dataset, index))
        sample["loss_mask"] = sample["loss_mask"].clone()
        sample["loss_mask"][: int(index) * 7 % 11] = 0
        return sample

    return masked


_NOTHING = 1e-30
"""The divisor in place of zero, for a norm that was not computed."""

EXPERTS = ".experts."
"""In the names of parameters that an expert group holds together, and not a replica."""

type Whole = dict[str, NDArray[np.float64]]
type Holder = tuple[str, int]


def replica_digests(outcomes: Mapping[int, Seen]) -> dict[Holder, Whole]:
    """Replica, or expert group -> name -> the full parameter, assembled from the parts of its ranks; every place is
    filled."""
    found: dict[Holder, Whole] = {}
    for seen in outcomes.values():
        for name, part in seen.parts.items():
            holder = ("experts", seen.expert_group) if EXPERTS in name else ("replica", seen.replica)
            whole = found.setdefault(holder, {}).setdefault(name, np.full(part.shape, np.nan))
            places: list[Any] = [slice(None)] * whole.ndim
            places[part.dim] = part.index
            whole[tuple(places)] = part.values
    for replica in found.values():
        for name, whole in replica.items():
            assert not np.isnan(whole).any(), f"{name} is not held everywhere"
    return found


def with_losses(outcomes: Mapping[int, Seen]) -> list[Seen]:
    """The ranks that know losses: those of the last stage."""
    return [seen for seen in outcomes.values() if seen.losses]


def largest_differences(outcomes: Mapping[int, Seen], reference: Mapping[int, Seen]) -> dict[str, float]:
    """The largest relative difference over all steps, ranks and replicas: of loss, norm and weights."""
    expected, weights = with_losses(reference)[0], dict[str, NDArray[np.float64]]()
    for holder in replica_digests(reference).values():
        weights = holder | weights
    worst = {"loss": 0.0, "grad_norm": 0.0, "weights": 0.0}
    of_steps = dict(zip(expected.steps_with_loss, expected.losses, strict=True))
    assert {step for seen in outcomes.values() for step in seen.steps_with_loss} == of_steps.keys()
    for seen in outcomes.values():
        theirs_then = [of_steps[step] for step in seen.steps_with_loss]
        for key, mine, theirs in (("loss", seen.losses, theirs_then), ("grad_norm", seen.norms, expected.norms)):
            assert len(mine) == len(theirs)
            apart = (abs(a - b) / max(abs(b), _NOTHING) for a, b in zip(mine, theirs, strict=True))
            worst[key] = max([worst[key], *apart])
    found = replica_digests(outcomes)
    assert {name for replica in found.values() for name in replica} == weights.keys()
    for (kind, _), replica in found.items():
        assert replica.keys() == {name for name in weights if (EXPERTS in name) == (kind == "experts")}
        for name, whole in replica.items():
            difference = np.abs(whole - weights[name]).max() / max(np.abs(weights[name]).max(), _NOTHING)
            worst["weights"] = max(worst["weights"], float(difference))
    return worst
