"""The table of everything of Megatron's that a job that begins hurt has replaced, with the reason of each.

A healthy job, or one without `--ntp-enable`, has none of it. Each line is a wish to upstream as well: what it would
take for the hook not to be needed stands in `patches/README.md`.
"""

from typing import Any

from ntp_plugin.config.sections import TrainingPolicy
from ntp_plugin.megatron import groups
from ntp_plugin.megatron.batch_share import BatchShare
from ntp_plugin.megatron.job import Job
from ntp_plugin.megatron.lane_optimizer import LaneOptimizer
from ntp_plugin.megatron.lane_sync import LaneSync
from ntp_plugin.megatron.layout import Layout
from ntp_plugin.megatron.pipeline import Pipeline
from ntp_plugin.megatron.replacements import Replacement
from ntp_plugin.megatron.uneven_layers import UnevenLayers

_LAYERS = "megatron.core.tensor_parallel.layers"
_P2P = "megatron.core.pipeline_parallel.p2p_communication"
_TRAINING = "megatron.training.training"


def table(layout: Layout, policy: TrainingPolicy, args: Any) -> tuple[Replacement, ...]:
    """The hooks of one job."""
    layers = UnevenLayers(layout, args, granule=policy.granule)
    job = Job(layout, policy, args)
    sync = LaneSync(job)
    share = BatchShare(job, sync)
    pipeline = Pipeline(layout)
    return (
        Replacement(
            target="megatron.core.parallel_state:RankGenerator",
            why="all groups have the same size upstream; the lost are struck from its lists",
            make=groups.without_lost(layout),
        ),
        Replacement(
            target="megatron.core.parallel_state:initialize_model_parallel",
            why="it divides the number of ranks by that of a replica's slots",
            make=groups.of_nominal_size(layout),
        ),
        Replacement(
            target="megatron.core.transformer.attention:SelfAttention.__init__",
            why="it divides the query groups evenly",
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
            why="the output layer divides the vocabulary evenly; any other that we do not know is refused",
            make=layers.column,
        ),
        Replacement(
            target=f"{_LAYERS}:RowParallelLinear.__init__",
            why="one that stands in neither attention nor MLP is refused",
            make=layers.row,
        ),
        Replacement(
            target=f"{_LAYERS}:_initialize_affine_weight_cpu",
            why="it draws the whole matrix in the size that it was told, which is virtual, and takes an even part",
            make=layers.initial_weight,
        ),
        Replacement(
            target="megatron.core.tensor_parallel.utils:VocabUtility.vocab_range_from_per_partition_vocab_size",
            why="the cross entropy takes all slots before for as wide as this one",
            make=layers.vocabulary_range,
        ),
        Replacement(
            target="megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
            why="its buckets are reduced over replicas of one width",
            make=sync.model_wrapper,
        ),
        Replacement(
            target="megatron.core.optimizer:_get_megatron_optimizer_based_on_param_groups",
            why="the distributed optimizer cuts its state over replicas of one width",
            make=LaneOptimizer(sync).build,
        ),
        Replacement(
            target="megatron.core.optimizer.optimizer:get_grad_norm_fp32",
            why="each replica finds it by itself, with other last bits",
            make=sync.norm,
        ),
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
        Replacement(
            target=f"{_TRAINING}:get_forward_backward_func",
            why="all replicas run the same number of micro-batches",
            make=share.schedule,
        ),
        Replacement(
            target=f"{_TRAINING}:build_train_valid_test_datasets",
            why="the loader is not told which set it is for",
            make=share.data_sets,
        ),
        Replacement(
            target=f"{_TRAINING}:build_pretraining_data_loader",
            why="its sampler shares samples out evenly",
            make=share.loader,
        ),
    )
