"""Reads which layers each pipeline stage has, where `--pipeline-model-parallel-layout` says it.

Megatron builds the stages by it, and the plugin takes a model as it was built. So the depths are for `ntp check`, which
builds none, and for refusals. Megatron puts the embedding into the first stage and the loss into the last one, as
without the flag.
"""

from typing import Any

from ntp_plugin.errors import ConfigError

type Kinds = list[str]
"""The kinds of layers of a virtual stage: `embedding`, `decoder`, `mtp`, `loss`."""


def stage_layers(args: Any) -> list[list[Kinds]] | None:
    """Return the virtual stages of each stage, or None if no layout is given.

    Raises:
        ConfigError: Megatron refuses the layout.
    """
    given = getattr(args, "pipeline_model_parallel_layout", None)
    if given is None:
        return None
    given = getattr(given, "input_data", given)  # a configuration has it as Megatron's own object
    # After the CPU emulation, which the caller may have installed.
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout  # noqa: PLC0415

    try:
        layout = PipelineParallelLayerLayout(given, args.pipeline_model_parallel_size)
        layout.validate_layer_layout(args.num_layers, args.mtp_num_layers)
    except AssertionError as error:
        raise ConfigError(
            f"--pipeline-model-parallel-layout {given}: {error}",
            fix="mend the layout: Megatron would not start",
        ) from None
    return [[[kind.name for kind in chunk] for chunk in stage] for stage in layout.layout]


def has_an_empty_stage(args: Any) -> bool:
    """Whether some stage has no layer in any of its virtual stages, so that its ranks have no parameters. A layout that
    Megatron refuses has none: Megatron says better what is wrong with it."""
    try:
        stages = stage_layers(args)
    except ConfigError:
        return False
    return stages is not None and not all(any(stage) for stage in stages)


def depths(stages: list[list[Kinds]]) -> tuple[int, ...]:
    """Return the transformer layers of each stage."""
    return tuple(sum(chunk.count("decoder") for chunk in stage) for stage in stages)
