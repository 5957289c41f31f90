"""Replicas of different width on Megatron against one uniform run, feature by feature, layout by layout.

    python -m benchmarks.numerics        the evidence for `make show-numerics`

Each row is the largest relative difference over 20 steps, all ranks and all replicas, to Megatron without the plugin:
one replica with as many stages that computes the whole batch. The noise floor is what Megatron shows between two
uniform widths.
"""

import os
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks import evidence
from benchmarks.parity.job import largest_differences, run
from benchmarks.parity.layouts import (
    BASE,
    BOTH_REPLICAS_HURT,
    FIRST_HURT,
    INTERLEAVED,
    LAYOUTS,
    MODELS,
    OLD,
    OPTIONS,
    PIPELINES,
    hurt,
    reference,
    uniform,
)
from ntp_plugin.errors import NtpError

SEED = 1234
BOUNDS = {"float64": 1e-12, "float32": 1e-6}
TIMES_THE_FLOOR = 4
USUAL_EPS = "1e-8"
WRONG = (
    "scale_by_replicas",
    "norms_not_synced",
    "gate_and_up_swapped",
    "vocabulary_row_shifted",
    "norm_not_synced",
)
WRONG_IN_A_PIPELINE = {"activations_of_another_micro_batch": BASE, "shared_rows_not_summed": "tied embeddings"}
"""By the feature that it is seen with."""
BF16 = {"dtype": "float32", "more": "--bf16"}
"""Of what Megatron calls float32 the weights and activations are bf16 then, and gradients and optimizer stay."""
_SHARDED = "distributed optimizer, overlap"
_IN_CI = {BASE: ["TP4+TP3", "TP3+TP3"], OLD: ["TP4+TP2"], _SHARDED: ["TP4+TP3"]}
_IN_PIPELINES = {
    BASE: list(PIPELINES),
    _SHARDED: [FIRST_HURT, BOTH_REPLICAS_HURT, INTERLEAVED],
    "recompute": [FIRST_HURT, INTERLEAVED],
    "per-token loss": [FIRST_HURT],
    "tied embeddings": [FIRST_HURT, BOTH_REPLICAS_HURT, INTERLEAVED],
}
_BIASED = (OLD, "biases, layernorm", "qkv bias")
_SOME = ["TP4+TP2", "TP3+TP3", "TP2+TP1"]


def cases(scale: str) -> Iterator[tuple[str, str, str]]:
    """Feature, layout, dtype."""
    for feature in (*MODELS, *OPTIONS):
        everywhere = scale == "full" or feature in (BASE, OLD)
        for layout in _IN_CI.get(feature, []) if scale == "ci" else LAYOUTS if everywhere else _SOME:
            yield feature, layout, "float64"
            if everywhere and scale != "ci":
                yield feature, layout, "float32"
    for feature, layouts in _IN_PIPELINES.items():
        for layout in [FIRST_HURT] if scale == "ci" else PIPELINES if scale == "full" else layouts:
            yield feature, layout, "float64"
    for feature in (BASE, _SHARDED) if scale != "ci" else ():
        for layout in ("TP4+TP3", "TP2+TP1"):
            yield feature, layout, "bfloat16"


def compared(feature: str, layout: str, **settings: Any) -> dict[str, float]:
    """One hurt run against the uniform one."""
    model = BASE if feature in OPTIONS else feature
    more = " ".join((OPTIONS.get(feature, ""), settings.get("more", ""))).strip()
    outcomes = run(hurt(model, layout, **{**settings, "more": more}))
    return largest_differences(outcomes, run(reference(model, layout, **settings)))


def noise_floor(feature: str, **settings: Any) -> dict[str, float]:
    """What Megatron shows between TP 2 and TP 4."""
    return largest_differences(run(uniform(feature, tp=2, **settings)), run(uniform(feature, **settings)))


def bounds_of(feature: str, dtype: str) -> dict[str, float]:
    """What loss, norm and weights may differ by.

    In bf16 rounding is coarse, and biases begin at zero: relative to what 20 steps make of them, float32's rounding is
    large. There it is what Megatron itself shows that counts.
    """
    if dtype == "bfloat16":
        floor = noise_floor(BASE, **BF16)
    elif dtype == "float32" and feature in _BIASED:
        floor = noise_floor(feature, dtype=dtype)
    else:
        return dict.fromkeys(("loss", "grad_norm", "weights"), BOUNDS[dtype])
    return {key: TIMES_THE_FLOOR * value for key, value in floor.items()}


def noticed(wrong: str, feature: str = BASE, layout: str = "TP4+TP3") -> bool:
    """Whether the comparison, or the plugin itself, finds what was spoilt."""
    try:
        worst = largest_differences(run(hurt(feature, layout, spoil=wrong)), run(reference(feature, layout)))
    except NtpError:
        return True
    return max(worst.values()) > BOUNDS["float64"]


def main(scale: str) -> int:
    rows: list[dict[str, Any]] = []
    worst: list[float] = []
    for feature, layout, dtype in cases(scale):
        found = compared(feature, layout, **(BF16 if dtype == "bfloat16" else {"dtype": dtype}))
        bounds = bounds_of(feature, dtype)
        rows.append({"feature": feature, "layout": layout, "dtype": dtype, **found, "bound": bounds["weights"]})
        worst.append(max(found[key] / bounds[key] for key in found))
        print(rows[-1], file=sys.stderr, flush=True)
    usual = {"dtype": "float32", "eps": USUAL_EPS}
    floor, at_usual = noise_floor(BASE, **usual), compared(BASE, "TP4+TP3", **usual)
    controls = [{"name": wrong, "noticed": noticed(wrong)} for wrong in WRONG]
    controls += [
        {"name": wrong, "noticed": noticed(wrong, feature, FIRST_HURT)}
        for wrong, feature in WRONG_IN_A_PIPELINE.items()
    ]
    holds = (
        max(worst) <= 1
        and all(at_usual[key] <= TIMES_THE_FLOOR * floor[key] for key in floor)
        and all(control["noticed"] for control in controls)
    )
    return evidence.show(
        "numerics",
        holds=holds,
        seed=SEED,
        rows=rows,
        scale=scale or "default",
        adam_eps="1e-4",
        noise_floor_at_eps_1e_8=floor,
        hurt_at_eps_1e_8=at_usual,
        negative_controls=controls,
    )


if __name__ == "__main__":
    sys.exit(main(os.environ.get("SCALE", "")))
