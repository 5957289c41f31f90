"""The models and layouts of the parity comparison."""

from typing import Any

from tests.harness.parity.job import Job

_BARE = "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope"
_GQA, _UNTIED = "--group-query-attention --num-query-groups 8", "--untie-embeddings-and-output-weights"
BASE = "swiglu, gqa, rope, untied"
OLD = "gelu, biases, tied, learned"
HYBRID, SEGMENTS = "hybrid", "hybrid in segments"
FOURS, IN_SPLITS = "micro-batches of 4", "in pieces"
SEQUENCE = "sequence parallel"
VIA_CORE = "via core"
DROPOUT = "dropout 0.1"
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
    "squared relu, partial rope": f"--squared-relu {_BARE} {_GQA} {_UNTIED} --rotary-percent 0.5 "
    "--apply-residual-connection-post-layernorm",
    HYBRID: f"--swiglu {_BARE} {_GQA} {_UNTIED} --hybrid-layer-pattern *--*",
    DROPOUT: f"--swiglu {_BARE} {_GQA} {_UNTIED} --hidden-dropout 0.1 --attention-dropout 0.1 "
    "--ntp-enable --ntp-dropout exact",
    FOURS: f"--swiglu {_BARE} {_GQA} {_UNTIED} --calculate-per-token-loss --micro-batch-size 4 --global-batch-size 24",
    OLD: "--position-embedding-type learned_absolute",
}
"""Models by feature: the first is the base, the others differ from it by what they are named for; the last combines all
others. Exact masks are in the uniform run as well: they make the runs equal."""

STAGED = {SEGMENTS: f"--swiglu {_BARE} {_GQA} {_UNTIED} --hybrid-layer-pattern *|-|-|*"}
"""Models that say themselves where stages begin."""

_LATENT = (
    f"--swiglu {_BARE} {_UNTIED} --transformer-impl transformer_engine --multi-latent-attention "
    "--kv-lora-rank 16 --qk-head-dim 4 --qk-pos-emb-head-dim 4 --v-head-dim 6"
)
LATENT, LATENT_OF_KEYS, LATENT_HYBRID = "latent", "latent, of keys alone", "latent, hybrid"
WITH_TE = {
    LATENT: f"{_LATENT} --q-lora-rank 24 --qk-layernorm",
    LATENT_OF_KEYS: f"{_LATENT} --rope-type rope",
    LATENT_HYBRID: f"{_LATENT} --q-lora-rank 24 --hybrid-layer-pattern +--+",
}
"""Models of TransformerEngine's layers."""

_IN_FP8 = (
    f"--swiglu {_BARE} --group-query-attention --num-query-groups 4 {_UNTIED} --transformer-impl transformer_engine "
    "--num-attention-heads 8 --kv-channels 16 --ffn-hidden-size 512 --seq-length 32 --max-position-embeddings 32 "
    "--train-iters 8"
)
FP8_DELAYED, FP8_HISTORY, FP8_CURRENT = "fp8, delayed", "fp8, delayed, of a history", "fp8, current"
WITH_TE |= {
    FP8_DELAYED: f"{_IN_FP8} --fp8-format hybrid",
    FP8_HISTORY: f"{_IN_FP8} --fp8-format e4m3 --fp8-amax-history-len 4 --fp8-amax-compute-algo max",
    FP8_CURRENT: f"{_IN_FP8} --fp8-format hybrid --fp8-recipe tensorwise",
}
"""Models in FP8, of sizes that its matrices can have at any width."""

MODELS |= {
    f"{SEQUENCE}: {feature}": f"{MODELS[feature]} --sequence-parallel"
    for feature in ("tied embeddings", "qk-layernorm", "per-token loss", DROPOUT, OLD)
}

_BUCKETS = "--overlap-grad-reduce --ddp-bucket-size 9000"
OPTIONS = {
    "distributed optimizer": "--use-distributed-optimizer",
    "overlap": _BUCKETS,
    "distributed optimizer, overlap": f"--use-distributed-optimizer {_BUCKETS}",
    "parameter gather overlap": f"--use-distributed-optimizer {_BUCKETS} --overlap-param-gather",
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "selective recompute": "--recompute-granularity selective",
    "recompute modules": "--recompute-granularity selective --recompute-modules core_attn mlp",
    SEQUENCE: "--sequence-parallel",
    VIA_CORE: "--ntp-route via_core",
    f"{VIA_CORE}, distributed optimizer, overlap": f"--ntp-route via_core --use-distributed-optimizer {_BUCKETS}",
    f"{VIA_CORE}, parameter gather overlap": f"--ntp-route via_core --use-distributed-optimizer {_BUCKETS} "
    "--overlap-param-gather",
}
"""Options that must make no difference: the base model on degraded replicas with the option, against the uniform run
without."""

OPTIONS |= {
    f"{SEQUENCE}, {option}": f"--sequence-parallel {OPTIONS[option]}"
    for option in ("distributed optimizer, overlap", "recompute", "recompute modules")
}

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

TIGHT = "--ntp-gpu-memory-gb 0.0012"
"""Room for a slot of TP3 that runs micro-batches of 4 in two pieces, and not in one."""
TIGHTLY = {f"{FOURS}; {IN_SPLITS}": (FOURS, IN_SPLITS)}
OPTIONS_OF_A_DEGRADED_RUN = OPTIONS | {IN_SPLITS: TIGHT}

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP4+TP3": {"tp": 4, "dp": 2, "lost": ("r1.s0.t3",)},
    "TP4+TP2": {"tp": 4, "dp": 2, "lost": ("r1.s0.t0,r1.s0.t3",)},
    "TP3+TP3": {"tp": 4, "dp": 2, "lost": ("r0.s0.t1", "r1.s0.t2")},
    "TP4+TP4+TP3": {"tp": 4, "dp": 3, "lost": ("r2.s0.t1",)},
    "TP2+TP1": {"tp": 2, "dp": 2, "lost": ("r0.s0.t0",)},
}


FIRST_DEGRADED, LAST_DEGRADED = "PP2: TP2,TP2 + TP1,TP2", "PP2: TP2,TP2 + TP2,TP1"
BOTH_REPLICAS_DEGRADED, MIDDLE_DEGRADED = "PP2: TP3,TP4 + TP4,TP2", "PP4: TP2,TP1,TP1,TP2 + whole"
INTERLEAVED = "PP2 x 2: TP2,TP2 + TP1,TP2"
_INTERLEAVED = {"tp": 2, "pp": 2, "chunks": 2, "dp": 2, "batch": 8}
PIPELINES: dict[str, dict[str, Any]] = {
    FIRST_DEGRADED: {"tp": 2, "pp": 2, "dp": 2, "lost": ("r1.s0.t1",)},
    LAST_DEGRADED: {"tp": 2, "pp": 2, "dp": 2, "lost": ("r1.s1.t0",)},
    "PP2: TP4,TP4 + TP4,TP3": {"tp": 4, "pp": 2, "dp": 2, "lost": ("r1.s1.t3",)},
    BOTH_REPLICAS_DEGRADED: {"tp": 4, "pp": 2, "dp": 2, "lost": ("r0.s0.t1", "r1.s1.t0,r1.s1.t3")},
    "PP2: TP2,TP2 + TP1,TP1": {"tp": 2, "pp": 2, "dp": 2, "lost": ("r1.s0.t0,r1.s1.t1",)},
    "PP2: TP4,TP4 + TP3,TP3": {"tp": 4, "pp": 2, "dp": 2, "lost": ("r1.s0.t2,r1.s1.t3",)},
    MIDDLE_DEGRADED: {"tp": 2, "pp": 4, "dp": 2, "lost": ("r0.s1.t0,r0.s2.t1",)},
    INTERLEAVED: {**_INTERLEAVED, "lost": ("r1.s0.t1",)},
    "PP2 x 2: TP2,TP1 + TP1,TP2": {**_INTERLEAVED, "lost": ("r0.s1.t0", "r1.s0.t0")},
}
"""Replicas in stages, some of them degraded; "x 2": two interleaved virtual stages on each rank."""

ONE_STAGE_LOST, FIRST_STAGE_LOST, LAST_STAGE_LOST = "PP4: without s1", "PP4: without s0", "PP4: without s3"
TWO_STAGES_LOST, ONE_STAGE_LEFT = "PP4: without s1 and s2", "PP4: s2 alone"
STAGE_AND_SLOT_LOST, BOTH_LOST_STAGES = "PP4, TP2: without s1, s2 as TP1", "PP2, three replicas: s1 and s0 alone"
DEEP = "PP3 of 9 layers: without s1"
_SINGLE = {"tp": 1, "pp": 4, "dp": 2}
LOST_STAGES: dict[str, dict[str, Any]] = {
    ONE_STAGE_LOST: {**_SINGLE, "lost": ("r1.s1",)},
    FIRST_STAGE_LOST: {**_SINGLE, "lost": ("r0.s0",)},
    LAST_STAGE_LOST: {**_SINGLE, "lost": ("r0.s3",)},
    TWO_STAGES_LOST: {**_SINGLE, "layers": 8, "lost": ("r1.s1,r1.s2",)},
    ONE_STAGE_LEFT: {**_SINGLE, "lost": ("r0.s0,r0.s1,r0.s3",)},
    STAGE_AND_SLOT_LOST: {"tp": 2, "pp": 4, "dp": 2, "lost": ("r1.s1,r1.s2.t0,r0.s3.t1",)},
    BOTH_LOST_STAGES: {"tp": 1, "pp": 2, "dp": 3, "layers": 4, "lost": ("r0.s0,r2.s1",)},
    DEEP: {"tp": 2, "pp": 3, "dp": 2, "layers": 9, "lost": ("r1.s1",)},
}
"""Replicas without some stage, so that their other stages have its layers."""


def uniform(model: str, *, tp: int = 4, **options: Any) -> Job:
    """One full-width replica that computes everything, with no part of the plugin that the model does not ask for."""
    return Job(model=(MODELS | STAGED | WITH_TE)[model], tp=tp, **options)


def reference(model: str, layout: str, **options: Any) -> Job:
    """The reference of a layout; it has as many stages, since each draws its weights by itself."""
    if layout in PIPELINES | LOST_STAGES:
        where = (PIPELINES | LOST_STAGES)[layout]
        options |= {key: value for key, value in where.items() if key not in ("dp", "lost")}
    return uniform(model, **options)


def degraded(model: str, layout: str | dict[str, Any], **options: Any) -> Job:
    """The same on replicas, some of which are degraded."""
    where = (LAYOUTS | PIPELINES | LOST_STAGES)[layout] if isinstance(layout, str) else layout
    return Job(model=(MODELS | STAGED | WITH_TE)[model], **where, **options)
