"""The models and layouts that parity is shown for."""

from typing import Any

from benchmarks.parity.job import Job

_BARE = "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope"
_GQA, _UNTIED = "--group-query-attention --num-query-groups 8", "--untie-embeddings-and-output-weights"
BASE = "swiglu, gqa, rope, untied"
OLD = "gelu, biases, tied, learned"
HYBRID = "hybrid"
MODELS = {
    BASE: f"--swiglu {_BARE} {_GQA} {_UNTIED}",
    "gelu": f"{_BARE} {_GQA} {_UNTIED}",
    "no gqa": f"--swiglu {_BARE} {_UNTIED}",
    "tied embeddings": f"--swiglu {_BARE} {_GQA}",
    "biases, layernorm": f"--swiglu --position-embedding-type rope {_GQA} {_UNTIED}",
    "learned positions": f"--swiglu --disable-bias-linear --normalization RMSNorm {_GQA} {_UNTIED}",
    "qk-layernorm": f"--swiglu {_BARE} {_GQA} {_UNTIED} --qk-layernorm",
    "qkv bias": f"--swiglu {_BARE} {_GQA} {_UNTIED} --add-qkv-bias",
    "per-token loss": f"--swiglu {_BARE} {_GQA} {_UNTIED} --calculate-per-token-loss",
    "sgd": f"--swiglu {_BARE} {_GQA} {_UNTIED} --optimizer sgd --sgd-momentum 0 --lr 0.5",
    "sgd, momentum": f"--swiglu {_BARE} {_GQA} {_UNTIED} --optimizer sgd --lr 0.2",
    "no clipping": f"--swiglu {_BARE} {_GQA} {_UNTIED} --clip-grad 0",
    "gated attention, window, sink, mup, own rates": f"--swiglu {_BARE} {_GQA} {_UNTIED} --attention-output-gate "
    "--softmax-type off-by-one --window-size 6,0 --use-mup --mup-base-hidden-size 32 --decoupled-lr 1e-3 "
    "--qk-layernorm --apply-wd-to-qk-layernorm",
    "squared relu, xavier, partial rope, fused loss": f"--squared-relu {_BARE} {_GQA} {_UNTIED} --rotary-percent 0.5 "
    "--init-method-xavier-uniform --apply-residual-connection-post-layernorm --cross-entropy-loss-fusion",
    HYBRID: f"--swiglu {_BARE} {_GQA} {_UNTIED} --hybrid-layer-pattern *--*",
    OLD: "--position-embedding-type learned_absolute",
}
"""By feature: the first is the base, the others differ from it by what they are named for; the last has it all else."""

_BUCKETS = "--overlap-grad-reduce --ddp-bucket-size 9000"
OPTIONS = {
    "distributed optimizer": "--use-distributed-optimizer",
    "overlap": _BUCKETS,
    "distributed optimizer, overlap": f"--use-distributed-optimizer {_BUCKETS}",
    "parameter gather overlap": f"--use-distributed-optimizer {_BUCKETS} --overlap-param-gather",
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "selective recompute": "--recompute-granularity selective",
    "recompute modules": "--recompute-granularity selective --recompute-modules core_attn mlp",
}
"""What must make no difference: the base model on hurt replicas with it, against the uniform run without."""

_SHARDED, _GATHERED = "distributed optimizer, overlap", "parameter gather overlap"
TOGETHER = {
    f"{model}; {option}": (model, option)
    for model, option in (
        (HYBRID, "distributed optimizer"),
        (OLD, "distributed optimizer"),
        ("tied embeddings", _GATHERED),
        ("qk-layernorm", _SHARDED),
        ("sgd, momentum", _GATHERED),
    )
}
"""Models with such an option, where the two might touch one another."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP4+TP3": {"tp": 4, "dp": 2, "lost": ("r1.s0.t3",)},
    "TP4+TP2": {"tp": 4, "dp": 2, "lost": ("r1.s0.t0,r1.s0.t3",)},
    "TP3+TP3": {"tp": 4, "dp": 2, "lost": ("r0.s0.t1", "r1.s0.t2")},
    "TP4+TP4+TP3": {"tp": 4, "dp": 3, "lost": ("r2.s0.t1",)},
    "TP2+TP1": {"tp": 2, "dp": 2, "lost": ("r0.s0.t0",)},
}


def uniform(model: str, *, tp: int = 4, **options: Any) -> Job:
    """One whole replica that computes everything, without the plugin."""
    return Job(model=MODELS[model], tp=tp, **options)


def hurt(model: str, layout: str | dict[str, Any], **options: Any) -> Job:
    """The same on replicas of which some are hurt."""
    return Job(model=MODELS[model], **(LAYOUTS[layout] if isinstance(layout, str) else layout), **options)
