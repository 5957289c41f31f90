"""The table of all Megatron functions that a degraded job replaces, with the reason for each.

A job that begins degraded has most of them. Two kinds are installed from the start, since a run that degrades later
would differ otherwise: masks that do not depend on the layout, and whole gradients of latent attention. Any other job,
or one without `--ntp-enable`, has nothing replaced. Each line is also a request to upstream: `patches/README.md` says
what would make the hook unnecessary. If a fork has applied a patch from there, the plugin calls the patched function
instead of installing the hook.
"""

import functools
from typing import Any

from megatron.core.extensions import transformer_engine as te

from ntp_plugin.config.sections import TrainingPolicy
from ntp_plugin.megatron import expert_hooks, fp8_scales, groups, muon
from ntp_plugin.megatron.batch_share import BatchShare
from ntp_plugin.megatron.checkpoint.checkpoints import CheckpointHooks, in_the_format_found
from ntp_plugin.megatron.checkpoint.lane_checkpoints import in_parameter_shapes
from ntp_plugin.megatron.job import JobPlan
from ntp_plugin.megatron.job_shape import rows_of_slots
from ntp_plugin.megatron.layers.context_ring import in_one_ring
from ntp_plugin.megatron.layers.dropout import ExactDropout, Firsts
from ntp_plugin.megatron.layers.latent_attention import with_whole_gradients
from ntp_plugin.megatron.layers.token_prediction import UnevenPrediction
from ntp_plugin.megatron.layers.uneven_delta_net import UnevenDeltaNet
from ntp_plugin.megatron.layers.uneven_experts import UnevenExperts
from ntp_plugin.megatron.layers.uneven_layers import UnevenLayers
from ntp_plugin.megatron.layers.uneven_sequence import UnevenSequence
from ntp_plugin.megatron.layout import Layout
from ntp_plugin.megatron.option_checks import draws_exact_masks
from ntp_plugin.megatron.pipeline import Pipeline
from ntp_plugin.megatron.prediction_losses import PredictionLosses
from ntp_plugin.megatron.reduction.lane_optimizer import LaneOptimizer
from ntp_plugin.megatron.reduction.lane_sync import LaneSync
from ntp_plugin.megatron.unsupported import has_partial_latent_keys
from ntp_plugin.patching import Offer, Replacement

_LAYERS = "megatron.core.tensor_parallel.layers"
_MAPPINGS = "megatron.core.tensor_parallel.mappings"
_RANDOM = "megatron.core.tensor_parallel.random"
_P2P = "megatron.core.pipeline_parallel.p2p_communication"
_TRAINING = "megatron.training.training"
_TE = "megatron.core.extensions.transformer_engine"
_PREDICTION = "megatron.core.transformer.multi_token_prediction"
_PARALLEL = "megatron.core.dist_checkpointing.strategies.fully_parallel"


def table(layout: Layout, policy: TrainingPolicy, args: Any) -> tuple[Replacement, ...]:
    """Return the hooks of one job."""
    if not layout.lost:
        return (*of_latent_attention(args), *_masks(layout, policy, args, nominal_firsts(layout, args)))
    job = JobPlan(layout, policy, args, make_groups=groups.by_torch(layout), alone=groups.alone)
    sync = LaneSync(job)
    share = BatchShare(job, sync)
    return (
        *_groups(layout),
        *of_a_layout(job, UnevenLayers(layout, args, granule=policy.granule), sync),
        *of_latent_attention(args),
        *of_the_optimizer(sync),
        *_logs(sync),
        *_batch(share),
        *_masks(layout, policy, args, share.firsts),
    )


def of_a_layout(job: JobPlan, layers: UnevenLayers, sync: LaneSync) -> tuple[Replacement, ...]:
    """Return the hooks that a degraded layout needs, from the start of a job or after a loss."""
    return (
        *of_layers(layers),
        *_sums(sync),
        *(_questions(sync) if job.layout.idle else ()),
        *(expert_hooks.of_routers(sync) if job.args.num_experts else ()),
        *_stages(Pipeline(job.layout, job.args)),
        *_sequences(job.layout, job.args),
        *_contexts(job.args),
        *_predictions(job, sync),
        *fp8_scales.hooks(job.args),
        *muon.hooks(job.args, sync),
        *_checkpoints(CheckpointHooks(job.layout, job.args, sync)),
        *(expert_hooks.of_checkpoints(job.layout, layers) if job.args.num_experts else ()),
    )


def _groups(layout: Layout) -> tuple[Replacement, ...]:
    """Return the hooks that decide who is in a group."""
    ranks = Offer(
        function="megatron.core.parallel_state:set_rank_lists",
        arguments=(layout.without_lost, layout.topology.size, layout.topology.dp, layout.slot.replica),
    )
    return (
        Replacement(
            target="megatron.core.parallel_state:RankGenerator",
            why="all groups have the same size upstream; the lost ranks are removed from its lists",
            make=groups.without_lost(layout),
            offer=ranks,
        ),
        Replacement(
            target="megatron.core.parallel_state:initialize_model_parallel",
            why="it divides the number of ranks by the number of slots of a replica",
            make=groups.of_nominal_size(layout),
            offer=ranks,
        ),
    )


def of_layers(layers: UnevenLayers) -> tuple[Replacement, ...]:
    """Return the hooks that set how wide a layer is, and its initial weights."""
    rows = Offer(
        function="megatron.core.tensor_parallel.utils:set_vocab_range", arguments=(layers.vocabulary_range(None),)
    )
    return (
        Replacement(
            target="megatron.core.transformer.attention:SelfAttention.__init__",
            why="it divides the query groups evenly",
            make=layers.attention,
        ),
        Replacement(
            target="megatron.core.transformer.multi_latent_attention:MLASelfAttention.__init__",
            why="it divides the heads evenly",
            make=layers.attention,
        ),
        Replacement(
            target="megatron.core.transformer.mlp:MLP.__init__",
            why="it divides the MLP's columns evenly",
            make=layers.mlp,
        ),
        Replacement(
            target=f"{_LAYERS}:VocabParallelEmbedding.__init__",
            why="it divides the vocabulary evenly, and finds a row by the first of its slot",
            make=layers.embedding,
        ),
        Replacement(
            target=f"{_LAYERS}:ColumnParallelLinear.__init__",
            why="the output layer divides the vocabulary evenly; any other unknown layer is refused",
            make=layers.column,
        ),
        *_projections(layers),
        Replacement(
            target=f"{_LAYERS}:RowParallelLinear.__init__",
            why="one outside of attention and MLP is refused",
            make=layers.row,
        ),
        *(
            Replacement(
                target=f"{module}:_initialize_affine_weight_cpu",
                why="it draws the whole matrix in its virtual size, and takes an even part",
                make=layers.initial_weight,
            )
            for module in (_LAYERS, _TE)
        ),
        Replacement(
            target="megatron.core.tensor_parallel.utils:VocabUtility.vocab_range_from_per_partition_vocab_size",
            why="the cross entropy assumes that all earlier slots are as wide as this one",
            make=layers.vocabulary_range,
            offer=rows,
        ),
        *(expert_hooks.of_experts(UnevenExperts(layers)) if layers.args.num_experts else ()),
        *(_delta_nets(UnevenDeltaNet(layers)) if layers.args.experimental_attention_variant else ()),
    )


def _delta_nets(delta_nets: UnevenDeltaNet) -> tuple[Replacement, ...]:
    """Return the hooks of gated delta nets."""
    return (
        Replacement(
            target="megatron.core.ssm.gated_delta_net.common:_GDNBase.__init__",
            why="it divides its heads evenly",
            make=delta_nets.layer,
        ),
    )


def _projections(layers: UnevenLayers) -> tuple[Replacement, ...]:
    """Return the hooks that set how wide the projection of multi-token prediction is, in both kinds of layers."""
    inside = Replacement(
        target=f"{_PREDICTION}:MultiTokenPredictionLayer.__init__",
        why="its projection is neither in attention nor in an MLP",
        make=layers.prediction,
    )
    column = Replacement(
        target=f"{_TE}:TEColumnParallelLinear.__init__",
        why="the projection of multi-token prediction divides its rows evenly",
        make=layers.te_column,
    )
    return (inside, column) if te.HAVE_TE else (inside,)


def _predictions(job: JobPlan, sync: LaneSync) -> tuple[Replacement, ...]:
    """Return the hooks of `--mtp-num-layers`."""
    if not job.args.mtp_num_layers:
        return ()
    prediction = UnevenPrediction(job.layout, job.args)
    return (
        Replacement(
            target=f"{_PREDICTION}:gather_from_tensor_model_parallel_region",
            why="it gathers as many columns from each slot",
            make=prediction.gather,
        ),
        Replacement(
            target=f"{_PREDICTION}:_vocab_parallel_argmax",
            why="it finds a token by the width of a slot's vocabulary, as if all were as wide",
            make=prediction.most_likely,
        ),
        Replacement(
            target=f"{_PREDICTION}:MTPLossLoggingHelper.reduce_metrics_in_tracker",
            why="it takes the mean over replicas that run the same number of micro-batches",
            make=PredictionLosses(job, sync).reduce,
        ),
    )


def of_latent_attention(args: Any) -> tuple[Replacement, ...]:
    """Return the hooks that complete the gradients of latent attention, in a full-width layout as well."""
    if not has_partial_latent_keys(args):
        return ()
    return (
        Replacement(
            target="megatron.core.transformer.multi_latent_attention:MLASelfAttention._qkv_down_projection",
            why="the gradient of what all heads share of the keys has the heads of one slot",
            make=functools.partial(with_whole_gradients, reports=args.rank == 0),
        ),
    )


def _sums(sync: LaneSync) -> tuple[Replacement, ...]:
    """Return the hooks for gradients, and their norm."""
    norm = Offer(function="megatron.core.optimizer.clip_grads:set_norm_agreement", arguments=(sync.agreed_norm,))
    return (
        Replacement(
            target="megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
            why="its buckets are reduced over replicas of one width",
            make=sync.model_wrapper,
        ),
        Replacement(
            target="megatron.core.optimizer.optimizer:get_grad_norm_fp32",
            why="each replica computes it alone, with other last bits",
            make=sync.norm,
            offer=norm,
        ),
        Replacement(
            target="megatron.core.optimizer.optimizer:count_zeros_fp32",
            why="it would count the pads of lane shards",
            make=sync.zeros,
        ),
        Replacement(
            target="megatron.core.optimizer.optimizer:MegatronOptimizer.get_grad_stats_parallel_group",
            why="in that of experts there are ranks of other replicas, which may be idle",
            make=sync.of_those_who_train,
        ),
    )


def _logs(sync: LaneSync) -> tuple[Replacement, ...]:
    """Return the hooks for what the log shows beside losses; a live job has a hook of its own there."""
    return (
        Replacement(
            target=f"{_TRAINING}:calc_params_l2_norm",
            why="with the distributed optimizer it looks for float32 parameters in Megatron's own shards",
            make=sync.parameters_norm,
        ),
        Replacement(
            target=f"{_TRAINING}:check_param_hashes_across_dp_replicas",
            why="it gathers hashes of even shares over groups of one width",
            make=sync.same_weights,
        ),
    )


def _questions(sync: LaneSync) -> tuple[Replacement, ...]:
    """Return the hooks for what Megatron asks of all ranks in a step, if some ranks are idle."""
    return (
        Replacement(
            target="megatron.core.rerun_state_machine:RerunStateMachine._reduce_any",
            why="it asks the whole world whether a step is to be computed again",
            make=sync.any_of_all,
        ),
    )


def of_the_optimizer(sync: LaneSync) -> tuple[Replacement, ...]:
    """Return the hooks for the optimizer, wherever it is built."""
    return (
        Replacement(
            target="megatron.core.optimizer:_get_megatron_optimizer_based_on_param_groups",
            why="the distributed optimizer cuts its state over replicas of one width; an unknown one is refused",
            make=LaneOptimizer(sync).build,
        ),
    )


def _stages(pipeline: Pipeline) -> tuple[Replacement, ...]:
    """Return the hooks for what stages send each other."""
    return (
        Replacement(
            target=f"{_P2P}:_batched_p2p_ops",
            why="each rank sends to one rank of the next stage, which may be wider",
            make=pipeline.batched,
        ),
        Replacement(
            target=f"{_P2P}:_p2p_ops",
            why="as above",
            make=pipeline.one_by_one,
        ),
    )


def _batch(share: BatchShare) -> tuple[Replacement, ...]:
    """Return the hooks that decide how many micro-batches a replica runs, and of which samples."""
    sampler = Offer(
        function="megatron.training.datasets.data_samplers:set_training_sampler", arguments=(share.samples,)
    )
    return (
        Replacement(
            target=f"{_TRAINING}:get_forward_backward_func",
            why="all replicas run the same number of micro-batches",
            make=share.schedule,
        ),
        Replacement(
            target=f"{_TRAINING}:build_train_valid_test_datasets",
            why="the loader does not know which set it is for",
            make=share.data_sets,
            offer=sampler,
        ),
        Replacement(
            target=f"{_TRAINING}:build_pretraining_data_loader",
            why="its sampler shares samples out evenly",
            make=share.loader,
            offer=sampler,
        ),
    )


def _checkpoints(checkpoints: CheckpointHooks) -> tuple[Replacement, ...]:
    """Return the hooks that decide what is saved and loaded, by which rank."""
    return (
        Replacement(
            target="megatron.training.checkpointing:generate_state_dict",
            why="it assumes even shares, and counts replicas in groups that have gaps",
            make=checkpoints.state,
        ),
        Replacement(
            target=f"{_TRAINING}:save_checkpoint",
            why="the format torch has one file for each slot, and some are lost",
            make=checkpoints.in_torch_dist,
        ),
        Replacement(
            target="megatron.training.checkpointing:_build_sharded_state_dict_metadata",
            why="a sharded optimizer is written by parameters: its buckets belong to one layout",
            make=in_parameter_shapes,
        ),
        Replacement(
            target=f"{_TRAINING}:load_checkpoint",
            why="the replicas compare what they have loaded",
            make=checkpoints.load,
        ),
        Replacement(
            target=f"{_PARALLEL}:FullyParallelSaveStrategyWrapper.apply_saving_parallelization",
            why="it identifies a shard by its beginning, and replicas of another width have longer shards there",
            make=checkpoints.share_out_nothing,
        ),
        Replacement(
            target=f"{_PARALLEL}:FullyParallelLoadStrategyWrapper.load",
            why="as above",
            make=checkpoints.each_for_itself,
        ),
    )


FORMATS: tuple[Replacement, ...] = (
    Replacement(
        target=f"{_TRAINING}:load_checkpoint",
        why="with --ckpt-format torch, a checkpoint is in torch_dist if slots were lost when it was saved",
        make=in_the_format_found,
    ),
)
"""What any job with `--ntp-enable` needs to load what a degraded one has saved."""


def nominal_firsts(layout: Layout, args: Any) -> Firsts:
    """Return the first sample of each of this replica's micro-batches, if nobody is lost."""
    context, contexts, size = layout.context, layout.topology.contexts, args.micro_batch_size
    return lambda count: range(context * size, count * contexts * size, contexts * size)


def _masks(layout: Layout, policy: TrainingPolicy, args: Any, firsts: Firsts) -> tuple[Replacement, ...]:
    """Return the hooks for the dropouts, if their masks are to be exact."""
    if not draws_exact_masks(args, policy):
        return ()
    exact = ExactDropout(layout, args, firsts, strict=policy.dropout == "exact")
    return (
        Replacement(
            target=f"{_TRAINING}:setup_model_and_optimizer",
            why="dropouts draw their masks from the slot's generator, in the order of calls",
            make=exact.model,
        ),
        *of_masks(exact),
    )


def of_masks(exact: ExactDropout) -> tuple[Replacement, ...]:
    """Return the hooks that give exact dropouts the samples they see."""
    return (
        Replacement(
            target=f"{_TRAINING}:get_forward_backward_func",
            why="no layer knows which samples it sees",
            make=exact.schedule,
        ),
        Replacement(
            target=f"{_RANDOM}:_get_all_rng_states",
            why="a recomputation must know which samples it saw",
            make=exact.random_state,
        ),
        Replacement(
            target=f"{_RANDOM}:_set_all_rng_states",
            why="as above",
            make=exact.put_back,
        ),
    )


def _sequences(layout: Layout, args: Any) -> tuple[Replacement, ...]:
    """Return the hooks of `--sequence-parallel`: none in a replica of nominal width, few if the width divides the
    sequence."""
    rows = rows_of_slots(args, layout.width)
    if not args.sequence_parallel or (layout.width == layout.topology.tp and not rows.pads):
        return ()
    sequence = UnevenSequence(rows)
    length = Replacement(
        target="megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.get_rotary_seq_len",
        why="it multiplies a slot's rows by the nominal TP degree",
        make=sequence.rotary_length,
    )
    pads = (
        Replacement(
            target=f"{_MAPPINGS}:_split_along_first_dim",
            why="it splits evenly or not at all",
            make=sequence.split,
        ),
        Replacement(
            target=f"{_MAPPINGS}:_gather_along_first_dim",
            why="it takes the pads for rows of the sequence",
            make=sequence.gather,
        ),
        Replacement(
            target=f"{_MAPPINGS}:_reduce_scatter_along_first_dim",
            why="it splits evenly or not at all",
            make=sequence.reduce_scatter,
        ),
        Replacement(
            target=f"{_LAYERS}:linear_with_grad_accumulation_and_async_allreduce",
            why="it gathers by itself, and takes the pads for rows of the sequence",
            make=sequence.column_linear,
        ),
        *(
            Replacement(
                target=f"megatron.core.ssm.gated_delta_net:{layer}.forward",
                why="it takes all rows of all slots for the sequence's",
                make=sequence.delta_net,
            )
            for layer in (["GatedDeltaNet"] if args.experimental_attention_variant else [])
        ),
        *_sequences_of_te(sequence),
    )
    return (length, *pads) if rows.pads else (length,)


def _contexts(args: Any) -> tuple[Replacement, ...]:
    """Return the hooks of `--hierarchical-context-parallel-sizes`."""
    if not args.hierarchical_context_parallel_sizes:
        return ()
    return (
        Replacement(
            target=f"{_TE}:TEDotProductAttention.__init__",
            why="it exchanges in two levels, whose sizes a smaller context group has not",
            make=in_one_ring,
        ),
    )


def _sequences_of_te(sequence: UnevenSequence) -> tuple[Replacement, ...]:
    """The same in TransformerEngine's layers, where there is TransformerEngine."""
    if not te.HAVE_TE:
        return ()
    columns = (
        Replacement(
            target=f"{_TE}:{layer}.forward",
            why="it takes all rows of all slots for the sequence's",
            make=sequence.column_forward,
        )
        for layer in ("TEColumnParallelLinear", "TELayerNormColumnParallelLinear")
    )
    row = Replacement(
        target=f"{_TE}:TERowParallelLinear.forward",
        why="it splits evenly or not at all",
        make=sequence.row_forward,
    )
    return (*columns, row)
