"""Says whether the layers of a job may move, and tells Megatron which layers the stages of a replica have. PURE.

Megatron asks `--pipeline-model-parallel-layout` first how many layers a stage builds and how they are numbered, in the
model, in checkpoints and in multi-token prediction. So a replica that has lost a stage gets a layout of its own in
Megatron's arguments, and its own number of stages. Which layers it lays where is planned from the model's shape
(`planning/layer_cuts.py`), before there is a model.
"""

import dataclasses
from typing import Any

from ntp_plugin.config.sections import TrainingPolicy
from ntp_plugin.megatron.job_shape import guard_of, makes_copies
from ntp_plugin.megatron.layout import Layout
from ntp_plugin.megatron.stage_layers import nominal_depths
from ntp_plugin.megatron.unsupported import MOVED
from ntp_plugin.planning.actions import MOVE_LAYERS
from ntp_plugin.planning.layer_cuts import Layers
from ntp_plugin.planning.topology import Topology
from ntp_plugin.planning.units import transformer_units

_BEFORE = "ntp_nominal_stages"
"""Where the arguments keep what `have_own_stages` has replaced."""
_OF_CONFIG = {
    "pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout": "pipeline_model_parallel_layout",
}
"""These arguments -> their names in a model's configuration."""


def layers_of(args: Any, policy: TrainingPolicy, topology: Topology) -> Layers:
    """Return the layers of the model that the arguments describe, once Megatron has validated them."""
    tied = not args.untie_embeddings_and_output_weights
    shape = dataclasses.replace(guard_of(args, 0).model, vocab_multiple=1, tied=tied)
    return Layers(
        units=transformer_units(shape, tp=topology.tp, pp=shape.layers, granule=policy.granule),
        depths=nominal_depths(args, shape.layers, topology.pp),
        least_stages=2 if tied else 1,
    )


def why_none_moves(args: Any, policy: TrainingPolicy, topology: Topology) -> str:
    """Return why a live job drops a replica that has lost a stage; empty if its layers move."""
    refused = next((refusal.flag for refusal in MOVED if refusal.applies(args)), "")
    reasons = {
        "there is one pipeline stage": topology.pp == 1,
        "--ntp-actions-forbid move-layers": MOVE_LAYERS.replace(" ", "-") in policy.actions.forbid,
        f"{refused} is not built for moved layers": refused,
        "--context-parallel-size is not built for moved layers": topology.cp > 1,
        "--ntp-gpu-memory-gb is not compared yet with what moved layers need": policy.gpu_memory_gb is not None,
        "their state would come from copies, which only jobs with --use-distributed-optimizer make of all": (
            not args.use_distributed_optimizer
        ),
        "their state would come from copies, and these are off (--ntp-copies-mode)": (
            not makes_copies(policy.copies, topology, sharded=True)
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def have_own_stages(args: Any, layout: Layout) -> None:
    """Set Megatron's arguments to the stages of this rank's replica: its own if its layers have moved, else the nominal
    ones."""
    vars(args).update(nominal_stages(args))
    placement, replica = layout.surviving.placement, layout.slot.replica
    if placement is None or replica not in placement.moved or layout.is_idle:
        return
    chunks = [["decoder"] * placement.depth(replica, stage) for stage in layout.stages]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    own = {
        "pipeline_model_parallel_size": len(chunks),
        "pipeline_model_parallel_layout": chunks if len(chunks) > 1 else None,
        "decoder_first_pipeline_num_layers": None,  # Megatron takes only one of these and the layout
        "decoder_last_pipeline_num_layers": None,
    }
    setattr(args, _BEFORE, {name: getattr(args, name) for name in own})
    vars(args).update(own)


def nominal_stages(args: Any) -> dict[str, Any]:
    """Return the arguments that `have_own_stages` has replaced, as they were."""
    return dict(getattr(args, _BEFORE, {}))


def stages_in_config(args: Any) -> dict[str, Any]:
    """Return the stages of this rank's replica under the names that they have in a model's configuration."""
    return {name: getattr(args, argument) for argument, name in _OF_CONFIG.items()}
