"""Reads which layers each pipeline stage nominally has. PURE.

Megatron builds the stages by its arguments, `--pipeline-model-parallel-layout` among them, and the plugin takes a model
as it was built. So the depths are for `ntp check`, which builds none, for moved layers (`moved_layers.py`), and for
refusals. Megatron puts the embedding into the first stage and the loss into the last one, with and without the flag.
"""

import re
from typing import Any

from ntp_plugin.config.sections import Parallel
from ntp_plugin.errors import ConfigError
from ntp_plugin.planning.units import stage_depths

type Kinds = list[str]
"""The kinds of layers of a virtual stage."""

_KINDS = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
_REPEATED = (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)")


def stage_layers(args: Any) -> list[list[Kinds]] | None:
    """Return the virtual stages of each stage, or None if no layout is given."""
    given = getattr(args, "pipeline_model_parallel_layout", None)
    if given is None:
        return None
    chunks = _chunks(getattr(given, "input_data", given))  # a configuration has Megatron's own object
    stages = getattr(args, "pipeline_model_parallel_size", 1)
    return [chunks[stage::stages] for stage in range(stages)]


def _chunks(given: Any) -> list[Kinds]:
    """Return the virtual stages in the order of the model."""
    if not isinstance(given, str):
        return [[str(getattr(kind, "name", kind)) for kind in chunk] for chunk in given]
    text = given.replace(",", "")
    for repeated in _REPEATED:
        text = re.sub(repeated, lambda found: found[1] * int(found[2]), text)
    return [[_KINDS.get(letter, letter) for letter in chunk] for chunk in text.split("|")]


def require_all_layers(args: Any) -> None:
    """Raise `ConfigError` if a layout has not as many layers as the model, or as many virtual stages on each rank."""
    stages = stage_layers(args)
    if stages is None:
        return
    kinds = [kind for stage in stages for chunk in stage for kind in chunk]
    wanted = {"embedding": 1, "decoder": args.num_layers, "mtp": args.mtp_num_layers or 0, "loss": 1}
    found = {kind: kinds.count(kind) for kind in wanted}
    if found != wanted or len(set(map(len, stages))) > 1:
        raise ConfigError(
            f"--pipeline-model-parallel-layout {args.pipeline_model_parallel_layout} has {found}, and the model"
            f" {wanted}, in {sum(map(len, stages))} virtual stages on {len(stages)} ranks: Megatron would not start",
            fix="mend the layout",
        )


def has_an_empty_stage(args: Any) -> bool:
    """Whether some stage has no layer in any of its virtual stages, so that its ranks have no parameters."""
    return not all(any(stage) for stage in stage_layers(args) or ())


def predicts_before_the_loss(args: Any) -> bool:
    """Whether the layers of multi-token prediction are in another virtual stage than the loss."""
    chunks = [chunk for stage in stage_layers(args) or () for chunk in stage]
    return any("mtp" in chunk and "loss" not in chunk for chunk in chunks)


def nominal_depths(args: Any, layers: int, pp: int) -> tuple[int, ...]:
    """Return how many layers each stage has; those of multi-token prediction are in the last."""
    stages = stage_layers(args)
    if stages is not None:
        return tuple(sum(chunk.count("decoder") + chunk.count("mtp") for chunk in stage) for stage in stages)
    *before, last = _given_depths(args, layers, pp)
    predicting = args.mtp_num_layers or 0
    return (*before, last + (min(predicting, 1) if args.mtp_use_repeated_layer else predicting))


def _given_depths(args: Any, layers: int, pp: int) -> tuple[int, ...]:
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if first is None and last is None:
        return stage_depths(layers, pp)
    return Parallel(tp=1, pp=pp, first_stage_layers=first, last_stage_layers=last).depths(layers)
