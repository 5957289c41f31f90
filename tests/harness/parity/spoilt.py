"""Negative controls: each plants one fault that the comparison must detect.

Called in a rank, before Megatron starts: the fault stays for the life of the process.
"""

import dataclasses
import functools
import gc
import sys
import time
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.num_microbatches_calculator import get_current_global_batch_size
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from ntp_plugin.copies.manifest import Manifest
from ntp_plugin.copies.store import CopyKey, Store
from ntp_plugin.copies.wire import Peer, PeerTrouble
from ntp_plugin.megatron import fp8_scales
from ntp_plugin.megatron import hooks as megatron_hooks
from ntp_plugin.megatron.checkpoint import checkpoints
from ntp_plugin.megatron.checkpoint.save_errors import SaveErrors
from ntp_plugin.megatron.job import JobPlan
from ntp_plugin.megatron.layers.dropout import ExactDropout
from ntp_plugin.megatron.layers.uneven_layers import UnevenLayers
from ntp_plugin.megatron.layers.uneven_sequence import UnevenSequence
from ntp_plugin.megatron.live import hooks, training_step, unsynced
from ntp_plugin.megatron.live.step_replay import LoopState
from ntp_plugin.megatron.live.trainer import MegatronTrainer
from ntp_plugin.megatron.live.training_step import TrainingStep
from ntp_plugin.megatron.live.unfinished_save import UnfinishedSave
from ntp_plugin.megatron.pipeline import Pipeline
from ntp_plugin.megatron.reduction.buckets import LaneBucketGroup
from ntp_plugin.megatron.reduction.lane_groups import Made
from ntp_plugin.megatron.reduction.lane_sync import LaneSync, bare
from ntp_plugin.patching import Replacement
from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.spans import Spans
from ntp_plugin.planning.units import ATTENTION, Tensor
from ntp_plugin.recovery.job_copies import JobCopies
from ntp_plugin.recovery.replica_comparison import ReplicaWatch
from ntp_plugin.reduction import core_slices
from ntp_plugin.reduction.core_slices import CoreSlices
from ntp_plugin.reduction.gradient_lanes import GradientLane, Slice
from ntp_plugin.resharding import rebuild, reshard
from ntp_plugin.resharding.rebuild import WEIGHT, Entries
from ntp_plugin.testing import harm
from tests.harness.parity.conditions import plant
from tests.harness.parity.spoilt_context import *  # noqa: F403
from tests.harness.parity.spoilt_prediction import *  # noqa: F403


def scale_by_replicas() -> None:
    """1 / DP, as if all replicas ran as many micro-batches."""
    plant(LaneSync, "scale", property(lambda sync: 1 / sync._layout.topology.dp))


def norms_not_synced() -> None:
    """The slot that the degraded replica has lost keeps its own replica's gradients of what is replicated."""
    reduce = LaneSync.finalize

    def finalize(sync: LaneSync, *args: Any, **kwargs: Any) -> None:
        odd = any(slot.tp == sync._layout.slot.tp for slot in sync._layout.lost)
        named = sync.parameters
        whole = [named[name] for name, tensor in sync.tensors.items() if not tensor.family] if odd else []
        before = [parameter.main_grad.clone() for parameter in whole]
        reduce(sync, *args, **kwargs)
        for parameter, own in zip(whole, before, strict=True):
            parameter.main_grad.copy_(own)

    plant(LaneSync, "finalize", finalize)


def gate_and_up_swapped() -> None:
    """A degraded replica takes the gradients of one half for those of the other."""
    plan = LaneSync._slices

    def slices(sync: LaneSync, units: Mapping[str, Spans]) -> tuple[Slice, ...]:
        named = sync.parameters
        return tuple(
            _swapped(tensor_slice, named[tensor_slice.name].shape[tensor_slice.dim] // 2)
            if sync._layout.pattern and len(sync.tensors[tensor_slice.name].runs) == 2
            else tensor_slice
            for tensor_slice in plan(sync, units)
        )

    plant(LaneSync, "_slices", slices)


def _swapped(tensor_slice: Slice, half: int) -> Slice:
    parts = [
        part for a, b in tensor_slice.ranges for part in ((a, min(b, half)), (max(a, half), b)) if part[0] < part[1]
    ]
    other = tuple((a + half, b + half) if b <= half else (a - half, b - half) for a, b in parts)
    return Slice(name=tensor_slice.name, dim=tensor_slice.dim, ranges=other)


def scales_of_a_replica_stay() -> None:
    """A degraded replica does not update FP8's scales."""
    make = fp8_scales.hooks

    def hooks_and_one(args: Any) -> tuple[Replacement, ...]:
        keep = Replacement(
            target="transformer_engine.pytorch.quantization:tex",
            why="its scales stay as they are",
            make=lambda _: types.SimpleNamespace(fused_amax_and_scale_update_after_reduction=lambda *_: None),
        )
        is_degraded = args.rank == args.world_size - 1
        return (*make(args), keep) if is_degraded else make(args)

    plant(fp8_scales, "hooks", hooks_and_one)


def units_to_the_wrong_core() -> None:
    """A slot that lends to two cores of its group exchanges what is as long for both."""
    find = core_slices.find_core_slices

    @functools.wraps(find)
    def exchanged(*args: Any, **kwargs: Any) -> CoreSlices:
        core_slices = find(*args, **kwargs)
        lent = [place for place, slices in enumerate(core_slices.out) if slices and place != core_slices.place]
        if len(lent) < 2:
            return core_slices
        out = [{tensor_slice.name: tensor_slice for tensor_slice in slices} for slices in core_slices.out]
        one, other = out[lent[0]], out[lent[1]]
        for name in one.keys() & other.keys():
            if sp.size(one[name].ranges) == sp.size(other[name].ranges):
                one[name], other[name] = other[name], one[name]
        return dataclasses.replace(core_slices, out=tuple(tuple(slices.values()) for slices in out))

    core_slices.find_core_slices = exchanged


def vocabulary_row_shifted() -> None:
    """A degraded replica looks its tokens up one row beside."""
    build = UnevenLayers.embedding

    def embedding(layers: UnevenLayers, original: Any) -> Any:
        init = build(layers, original)

        @functools.wraps(original)
        def shifted(module: Any, *args: Any, **kwargs: Any) -> None:
            init(module, *args, **kwargs)
            if layers.layout.pattern:
                module.vocab_start_index += 1
                module.vocab_end_index += 1

        return shifted

    plant(UnevenLayers, "embedding", embedding)


def norm_not_synced() -> None:
    """Each replica clips by the norm that it found."""
    plant(LaneSync, "norm", lambda _, original: original)


def partial_sums_not_added() -> None:
    """Under sequence parallelism, what a slot's own rows say of a norm's gradient is taken for all of it."""
    Replacement(
        target="megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads",
        why="to be noticed",
        make=lambda _: lambda *_, **__: None,
    ).apply()


def shared_keys_of_one_slot() -> None:
    """In latent attention, what a slot's own heads say of the gradient of the keys' rotary part is taken for all."""
    plant(megatron_hooks, "of_latent_attention", lambda _: ())


def pads_taken_for_rows() -> None:
    """The rows of a gathered sequence are its last ones, as if the pads came first."""
    plant(UnevenSequence, "_without_pads", lambda sequence, whole: whole[sequence._rows.pads :])


def parameters_not_awaited() -> None:
    """A forward begins with the parameters that it finds, and never waits for those that are on their way."""
    plant(LaneBucketGroup, "finish_param_sync", lambda *_, **__: None)


def layer_frozen() -> None:
    """The script trains all but the first matrices of the MLPs."""
    build = UnevenLayers.mlp

    def mlp(layers: UnevenLayers, original: Any) -> Any:
        init = build(layers, original)

        @functools.wraps(original)
        def frozen(module: Any, *args: Any, **kwargs: Any) -> None:
            init(module, *args, **kwargs)
            module.linear_fc1.weight.requires_grad_(False)

        return frozen

    plant(UnevenLayers, "mlp", mlp)


def optimizer_replaced() -> None:
    """Another class replaces torch's AdamW for Megatron."""

    class Preconditioned(torch.optim.AdamW):
        pass

    plant(torch.optim, "AdamW", Preconditioned)


def masks_of_the_slot() -> None:
    """Dropouts draw as Megatron's do: those of heads from a generator of the slot, all others from the replica's."""

    def over_heads(_: ExactDropout, __: int, x: torch.Tensor, p: float) -> torch.Tensor:
        with get_cuda_rng_tracker().fork():
            return torch.nn.functional.dropout(x, p)

    plant(ExactDropout, "over_heads", over_heads)
    plant(ExactDropout, "over_rows", lambda _, __, x, p: torch.nn.functional.dropout(x, p))


def heads_numbered_by_the_slot() -> None:
    """A slot takes its heads for the first ones of the model."""
    find = ExactDropout._heads
    plant(ExactDropout, "_heads", lambda exact, device: torch.arange(len(find(exact, device)), device=device))


def samples_numbered_by_the_replica() -> None:
    """A replica takes its micro-batches for the first ones of the batch."""
    number = ExactDropout._numbered

    def numbered(exact: ExactDropout, forward_step: Any, count: int) -> Any:
        exact._firsts = lambda _: range(100)
        return number(exact, forward_step, count)

    plant(ExactDropout, "_numbered", numbered)


def activations_of_another_micro_batch() -> None:
    """A degraded replica sends on what it has made of the micro-batch before."""
    operations = Pipeline._operations
    before: list[torch.Tensor] = []

    def late(pipeline: Pipeline, *, tensor_send_next: torch.Tensor | None, **options: Any) -> Any:
        if tensor_send_next is not None:
            before.append(tensor_send_next.clone())
            tensor_send_next = before[-2:][0]
        return operations(pipeline, tensor_send_next=tensor_send_next, **options)

    plant(Pipeline, "_operations", late)


def shared_rows_not_summed() -> None:
    """Each stage steps its copy of the word embedding by its own gradient."""
    make = LaneSync._shared_lanes

    def alone(sync: LaneSync, made: Made, **options: Any) -> list[GradientLane]:
        return [dataclasses.replace(lane, group=None) for lane in make(sync, made, **options)]

    plant(LaneSync, "_shared_lanes", alone)


def units_swapped_in_a_checkpoint() -> None:
    """The first and the last query group of a slot change places in what it writes, its own output projection not."""
    split = checkpoints.in_slices

    def swapped(entry: Any, whole: Tensor, places: Spans) -> Any:
        if whole.family.startswith(ATTENTION) and whole.dim == 0:
            size = whole.runs[0].unit_size
            first, *others, last = [(at, at + size) for start, stop in places for at in range(start, stop, size)]
            places = (last, *others, first)
        return split(entry, whole, places)

    plant(checkpoints, "in_slices", swapped)


def samples_not_rewound() -> None:
    """A repeated step draws the samples that follow, by the share of before."""

    def begin_work(state: LoopState) -> None:
        state._samples.drawn.clear()

    plant(LoopState, "begin_work", begin_work)


def replicas_begin_apart() -> None:
    """One slot has drawn a weight that the other replicas have not."""
    compare = MegatronTrainer._refuse_unequal_replicas

    def apart(trainer: MegatronTrainer) -> None:
        if trainer._groups.slot == 1:
            next(iter(trainer.state.live.parameters.values())).data[0, 0] += 1e-12
        compare(trainer)

    plant(MegatronTrainer, "_refuse_unequal_replicas", apart)


def a_buffer_that_nobody_knows() -> None:
    """The model has one, which its checkpoints hold."""
    begin = MegatronTrainer.begin

    def odd(trainer: MegatronTrainer) -> None:
        bare(trainer._model_rebuild.chunks[0]).register_buffer("odd", torch.ones(3))
        begin(trainer)

    plant(MegatronTrainer, "begin", odd)


def a_bit_flips() -> None:
    """In a weight of slot 3, when the sixth step is over. Of a sharded optimizer it is put right by the next gather."""

    def flip(step: TrainingStep) -> None:
        weight = next(iter(step._trainer.state.live.parameters.values())).data
        weight.view(-1)[:1].view(torch.uint8)[0] ^= 1

    _when_six_steps_are_over(flip)


def a_number_is_lost() -> None:
    """The last weight of slot 3 is NaN, when the sixth step is over: its own replica alone sees it."""

    def lose(step: TrainingStep) -> None:
        weight = list(step._trainer.state.live.parameters.values())[-1].data
        weight.view(-1)[0] = torch.nan

    _when_six_steps_are_over(lose)


def all_lose_a_number() -> None:
    """The same weight of all slots is NaN, when the sixth step is over."""

    def lose(step: TrainingStep) -> None:
        for weight in step._trainer.state.live.parameters.values():
            weight.data.fill_(torch.nan)

    _when_six_steps_are_over(lose, slots=range(64))


def a_bit_flips_in_its_own_shard() -> None:
    """Flip a bit of slot 3's optimizer after the sixth step: it is in that slot's weights, and would be in its copy."""

    def flip(step: TrainingStep) -> None:
        shard = step._trainer.state._model_rebuild.optimizer.optimizer.param_groups[0]["params"][0]
        shard.data.view(-1)[:1].view(torch.uint8)[6] ^= 1

    _when_six_steps_are_over(flip)


def replicas_compared_by_sums_alone() -> None:
    """Replicas are compared by sums alone: for tests that sums suffice."""
    plant(ReplicaWatch, "_odd_of_all", None)


def _when_six_steps_are_over(flip: Callable[[TrainingStep], None], *, slots: Collection[int] = (3,)) -> None:
    """In slot 3, once, before anything is compared or copied."""
    catch_up, flipped_after = TrainingStep.catch_up, set[int]()

    def flipped(step: TrainingStep) -> None:
        copies = step._trainer.copies
        done = step._args.curr_iteration if copies is None else copies.steps
        if done == 6 and step._trainer.slot_number in slots and not flipped_after:
            flipped_after.add(done)
            flip(step)
        catch_up(step)

    plant(TrainingStep, "catch_up", flipped)


def an_own_copy_of_slot_0_is_corrupt() -> None:
    """The newest near one, which others have sound far copies of; found where it is read, in a recovery."""
    describe = JobCopies.describe

    def described(copies: JobCopies) -> str:
        description = describe(copies)
        if copies._slot == 0:
            harm.spoil_copy(copies._rank.place.copies, 0, seed=0)
        return description

    plant(JobCopies, "describe", described)


def far_copies_do_not_arrive() -> None:
    """Far copies never arrive, and slot 3's near ones take so long that a step begins meanwhile."""
    complete = Store.complete

    def lost(*_: Any, **__: Any) -> list[str]:
        raise PeerTrouble("what is sent does not arrive")

    def slow(store: Store, place: CopyKey, manifest: Manifest) -> None:
        if place.slot == 3:
            time.sleep(0.3)
        complete(store, place, manifest)

    plant(Peer, "put", lost)
    plant(Store, "complete", slow)


def dealt_units_swapped() -> None:
    """A slot puts received units where those of its neighbour belong; digests detect that."""
    put = rebuild._put

    def swapped(tensor: Tensor, part: torch.Tensor, held: Spans, wanted: Spans, values: torch.Tensor) -> None:
        put(tensor, part, held, wanted, values.flip(tensor.dim))

    plant(rebuild, "_put", swapped)


def dealt_units_swapped_and_not_compared() -> None:
    """The same without the comparison of digests."""
    dealt_units_swapped()
    plant(reshard, "compare", lambda *_, **__: None)


def what_an_optimizer_keeps_arrives_doubled() -> None:
    """Optimizer state that arrives after the weights is doubled."""
    arrived = reshard._UnderWay._arrived

    def doubled(under_way: reshard._UnderWay) -> dict[str, Entries]:
        built = arrived(under_way)
        for name, one in under_way.rebuildings.items():
            if one.arriving and WEIGHT not in built[name]:
                built[name]["exp_avg"].mul_(2)
        return built

    plant(reshard._UnderWay, "_arrived", doubled)


def what_an_optimizer_keeps_arrives_doubled_and_is_not_compared() -> None:
    """The same without the digests, which would detect it."""
    what_an_optimizer_keeps_arrives_doubled()
    plant(reshard, "compare", lambda *_, **__: None)


def what_is_left_of_a_step_is_collected_in_another() -> None:
    """Contexts that a pipeline's schedule entered and never left are kept, and end when a later step has entered its
    own; Python's collector may do this by itself. That is harmless."""
    plant(hooks, "no_sync", _ends_in_another_step(unsynced.no_sync))


def what_is_left_of_a_step_is_collected_in_another_by_megatron() -> None:
    """The same with Megatron's own, which says then that the last micro-batch has come."""
    plant(hooks, "no_sync", _ends_in_another_step(DistributedDataParallel.no_sync))


_LATER = 8
"""Entered by so many steps before."""


def _ends_in_another_step(no_sync: Callable[[Any], Any]) -> Callable[[Any], Any]:
    kept: list[Any] = []

    class Entered:
        def __init__(self, ddp: Any) -> None:
            self._inner = no_sync(ddp)

        def __enter__(self) -> None:
            self._inner.__enter__()
            if len(kept) == _LATER:
                kept.clear()
                gc.collect()
            kept.append(self._inner)

        def __exit__(self, *error: Any) -> None:
            self._inner.__exit__(*error)

    def entered(ddp: Any) -> Entered:
        return Entered(ddp)

    return entered


def writers_share() -> None:
    """Threads that write a checkpoint write the tensors that the training goes on to change."""
    from ntp_plugin.megatron.checkpoint import background_writer  # noqa: PLC0415

    plant(background_writer, "_own_copies", lambda _, staged: staged)


def void_ones_stay() -> None:
    """Megatron keeps the non-persistent checkpoint with the highest number."""
    plant(UnfinishedSave, "removing_older", lambda _, original: original)


def scale_changes_before_the_vote() -> None:
    """The loss scale counts a step that a loss undoes."""
    from ntp_plugin.megatron.live.loss_scale import LossScale  # noqa: PLC0415

    plant(LossScale, "deferred", lambda _, original: original)
    plant(LossScale, "step_is_over", lambda *_, **__: None)


def sampler_keeps_the_first_batch() -> None:
    """The samples of a replica with a lost slot are those of the first size of the global batch, in all steps."""
    plant(JobPlan, "batch_at", _if_degraded(JobPlan.batch_at, lambda job, _: job.shared_out(job._schedule.at(0))))


def scale_keeps_the_first_batch() -> None:
    """The gradients of such a replica weigh as if the global batch had its first size, in all steps."""

    def scale(sync: Any) -> float:
        job = sync._job
        batch, share = job.shared_out(job._schedule.at(0) if job.layout.pattern else get_current_global_batch_size())
        return float(share.count * share.size / (batch.total * batch.micro_batch))

    plant(LaneSync, "scale", property(scale))


def repeated_steps_have_the_newest_batch() -> None:
    """The calculator of micro-batches does not follow steps that are repeated."""
    plant(training_step, "update_num_microbatches", lambda *_, **__: None)


def statistics_are_rounded() -> None:
    """Fused attention returns its softmax statistics in single precision."""
    from ntp_plugin.megatron.te_emulation import attention, extension  # noqa: PLC0415

    def rounded(*given: Any) -> Any:
        out, statistics, state = attention.fused_attn_fwd(*given)
        return [out, torch.from_numpy(statistics.numpy().astype("float32")).double(), state]

    plant(sys.modules[extension.NAME], "fused_attn_fwd", rounded)


def _if_degraded(original: Any, spoilt: Any) -> Any:
    return lambda job, *args: (spoilt if job.layout.pattern else original)(job, *args)


def errors_of_saves_are_raised() -> None:
    """The plugin leaves Megatron alone with a file that cannot be written."""
    plant(SaveErrors, "table", lambda _: ())
    plant(SaveErrors, "asking", lambda _, barrier: barrier)
    plant(UnfinishedSave, "attempted", lambda _, original: original)
