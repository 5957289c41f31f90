"""Compare replicas of different width on Megatron with one uniform run, feature by feature, layout by layout.

    python -m benchmarks.numerics             every feature, alternating layouts: the evidence for `make show-numerics`
    SCALE=ci python -m benchmarks.numerics    the slice for CI
    SCALE=full ...                            every feature in every layout

Each row is the largest relative difference over 20 steps, all ranks and all replicas, from Megatron without the plugin:
one replica with as many stages that computes the whole batch. The noise floor is the difference of two uniform widths
in Megatron. Each negative control has one planted fault, and must be detected.
"""

import math
import os
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks import evidence
from ntp_plugin.errors import NtpError
from tests.harness.parity.job import largest_differences, run
from tests.harness.parity.layouts import (
    BASE,
    BOTH_REPLICAS_DEGRADED,
    DROPOUT,
    FIRST_DEGRADED,
    HYBRID,
    INTERLEAVED,
    LAYOUTS,
    MODELS,
    OLD,
    OPTIONS,
    OPTIONS_OF_A_DEGRADED_RUN,
    PIPELINES,
    SEGMENTS,
    SEQUENCE,
    TIGHTLY,
    TOGETHER,
    VIA_CORE,
    degraded,
    reference,
    uniform,
)

SEED = 1234
BOUNDS = {"float64": 1e-12, "float32": 1e-6}
TIMES_THE_FLOOR = 4
USUAL_EPS = "1e-8"
BF16 = {"dtype": "float32", "more": "--bf16"}
"""Of what Megatron calls float32 the weights and activations are bf16 then, and gradients and optimizer stay."""
_SHARDED = "distributed optimizer, overlap"

CONTROLS = {
    "scale_by_replicas": (BASE, "TP4+TP3"),
    "norms_not_synced": (BASE, "TP4+TP3"),
    "gate_and_up_swapped": (BASE, "TP4+TP3"),
    "vocabulary_row_shifted": (BASE, "TP4+TP3"),
    "norm_not_synced": (BASE, "TP4+TP3"),
    "units_to_the_wrong_core": (VIA_CORE, "TP4+TP3"),
    "parameters_not_awaited": ("parameter gather overlap", "TP4+TP3"),
    "partial_sums_not_added": (SEQUENCE, "TP4+TP3"),
    "pads_taken_for_rows": (SEQUENCE, "TP4+TP3"),
    "masks_of_the_slot": (DROPOUT, "TP4+TP3"),
    "heads_numbered_by_the_slot": (DROPOUT, "TP4+TP3"),
    "samples_numbered_by_the_replica": (DROPOUT, "TP4+TP3"),
    "activations_of_another_micro_batch": (BASE, FIRST_DEGRADED),
    "shared_rows_not_summed": ("tied embeddings", FIRST_DEGRADED),
}
"""Planted faults (`parity/spoilt.py`), and the runs that must detect them."""

_EVERYWHERE = (BASE, OLD, SEQUENCE)
_IN_PIPELINES = {
    BASE: list(PIPELINES),
    _SHARDED: [FIRST_DEGRADED, BOTH_REPLICAS_DEGRADED, INTERLEAVED],
    "parameter gather overlap": [FIRST_DEGRADED, INTERLEAVED],
    VIA_CORE: [FIRST_DEGRADED, BOTH_REPLICAS_DEGRADED],
    DROPOUT: [FIRST_DEGRADED, INTERLEAVED],
    SEQUENCE: [FIRST_DEGRADED, BOTH_REPLICAS_DEGRADED, INTERLEAVED],
    "recompute": [FIRST_DEGRADED, INTERLEAVED],
    "per-token loss": [FIRST_DEGRADED],
    HYBRID: [FIRST_DEGRADED, BOTH_REPLICAS_DEGRADED],
    SEGMENTS: [INTERLEAVED],
    "tied embeddings": [FIRST_DEGRADED, BOTH_REPLICAS_DEGRADED, INTERLEAVED],
}
_IN_CI = {
    BASE: ["TP4+TP3", "TP3+TP3", FIRST_DEGRADED],
    OLD: ["TP4+TP2"],
    DROPOUT: ["TP2+TP1"],
    _SHARDED: ["TP4+TP3", FIRST_DEGRADED],
    SEQUENCE: ["TP4+TP3"],
    VIA_CORE: ["TP4+TP2"],
}
_BIASED = (OLD, "biases, layernorm", "qkv bias")


def cases(scale: str) -> Iterator[tuple[str, str, str]]:
    """Feature, layout, dtype."""
    if scale == "ci":
        yield from ((feature, layout, "float64") for feature, layouts in _IN_CI.items() for layout in layouts)
        return
    for number, feature in enumerate((*MODELS, *OPTIONS, *TOGETHER)):
        everywhere = scale == "full" or feature in _EVERYWHERE
        for layout in LAYOUTS if everywhere else [list(LAYOUTS)[number % len(LAYOUTS)]]:
            yield feature, layout, "float64"
            if scale == "full" or feature == BASE:
                yield feature, layout, "float32"
    for feature, layouts in _IN_PIPELINES.items():
        for layout in PIPELINES if scale == "full" else layouts:
            yield feature, layout, "float64"
    for feature, layout in ((OLD, "TP3+TP3"), (SEQUENCE, "TP4+TP3"), (_SHARDED, "TP4+TP2")):
        yield feature, layout, "float32"
    for feature in TIGHTLY:
        for layout in ("TP4+TP3", "TP3+TP3"):
            yield feature, layout, "float64"
    for feature in (BASE, _SHARDED):
        for layout in ("TP4+TP3", "TP2+TP1"):
            yield feature, layout, "bfloat16"


def controls(scale: str) -> list[str]:
    """Planted faults: in CI one for each feature of the slice that has any."""
    if scale != "ci":
        return list(CONTROLS)
    first_of = {feature: wrong for wrong, (feature, _) in reversed(CONTROLS.items())}
    return [first_of[feature] for feature in _IN_CI if feature in first_of]


def compared(feature: str, layout: str, *, spoil: str = "", more: str = "", **settings: Any) -> dict[str, float]:
    """One degraded run, with what must make no difference, against the uniform one without."""
    model, option = (TOGETHER | TIGHTLY).get(feature, (BASE, feature) if feature in OPTIONS else (feature, ""))
    both = f"{OPTIONS_OF_A_DEGRADED_RUN.get(option, '')} {more}".strip()
    outcomes = run(degraded(model, layout, spoil=spoil, more=both, **settings))
    return largest_differences(outcomes, run(reference(model, layout, more=more, **settings)))


def noise_floor(feature: str, **settings: Any) -> dict[str, float]:
    """The difference of stock Megatron between TP 2 and TP 4."""
    return largest_differences(run(uniform(feature, tp=2, **settings)), run(uniform(feature, **settings)))


def bounds_of(feature: str, dtype: str) -> dict[str, float]:
    """Bounds for loss, norm and weights. In bf16 rounding is coarse, and biases begin at zero: relative to their size
    after 20 steps, float32's rounding is large. There the noise floor of Megatron itself is the bound."""
    if dtype == "bfloat16":
        floor = noise_floor(BASE, **BF16)
    elif dtype == "float32" and feature in _BIASED:
        floor = noise_floor(feature, dtype=dtype)
    else:
        return dict.fromkeys(("loss", "grad_norm", "weights"), BOUNDS[dtype])
    return {key: TIMES_THE_FLOOR * value for key, value in floor.items()}


def noticed(wrong: str) -> bool:
    """Return whether the comparison, or the plugin itself, detects the planted fault."""
    try:
        worst = compared(*CONTROLS[wrong], spoil=wrong)
    except NtpError:
        return True
    return max(worst.values()) > BOUNDS["float64"]


def main(scale: str) -> int:
    rows: list[dict[str, Any]] = []
    worst: list[float] = []
    for feature, layout, dtype in cases(scale):
        rows.append({"feature": feature, "layout": layout, "dtype": dtype})
        try:
            found = compared(feature, layout, **(BF16 if dtype == "bfloat16" else {"dtype": dtype}))
        except (RuntimeError, TimeoutError, AssertionError, NtpError) as error:  # the other rows are worth knowing
            rows[-1] |= {"failed": str(error)}
            worst.append(math.inf)
        else:
            bounds = bounds_of(feature, dtype)
            rows[-1] |= found | {"bound": bounds["weights"]}
            worst.append(max(found[key] / bounds[key] for key in found))
        print(rows[-1], file=sys.stderr, flush=True)
    usual = {"dtype": "float32", "eps": USUAL_EPS}
    floor, at_usual = noise_floor(BASE, **usual), compared(BASE, "TP4+TP3", **usual)
    spoilt = [{"name": wrong, "noticed": noticed(wrong)} for wrong in controls(scale)]
    holds = (
        max(worst) <= 1
        and all(at_usual[key] <= TIMES_THE_FLOOR * floor[key] for key in floor)
        and all(control["noticed"] for control in spoilt)
    )
    return evidence.show(
        "numerics",
        holds=holds,
        seed=SEED,
        rows=rows,
        scale=scale or "default",
        adam_eps="1e-4",
        noise_floor_at_eps_1e_8=floor,
        degraded_at_eps_1e_8=at_usual,
        negative_controls=spoilt,
    )


if __name__ == "__main__":
    sys.exit(main(os.environ.get("SCALE", "")))
