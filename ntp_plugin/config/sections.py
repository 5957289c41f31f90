"""The keys that a user may set, section by section.

`Policy` is the plugin's own block: `[ntp]` in a TOML file, `"ntp": {...}` in a `ds_config.json`, `--ntp-...` flags in
Megatron. The other sections describe a job to `ntp plan`; inside a training job the framework knows them already.
"""

import dataclasses

from ntp_plugin.config.layer_frequency import layers_by_frequency
from ntp_plugin.config.schema import key, require_valid, subsection
from ntp_plugin.errors import ConfigError

MAX_GPUS = 4_194_304
"""Thirty times the largest planned cluster: a larger number is a typing error."""
MAX_SHARERS = 64
"""Most members of one parity: to rebuild one of them, all others are read."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """The nominal layout of the job, and the placement of its ranks."""

    tp: int = key(help="tensor-parallel degree", at_least=1, at_most=1024)
    pp: int = key(1, help="pipeline stages", at_least=1, at_most=1024)
    dp: int = key(1, help="data-parallel replicas", at_least=1, at_most=MAX_GPUS)
    cp: int = key(1, help="context-parallel degree: parts of each sequence", at_least=1, at_most=1024)
    ep: int = key(1, help="expert-parallel degree", at_least=1, at_most=MAX_GPUS)
    etp: int | None = key(
        None, help="expert-tensor-parallel degree: column parts of each expert (default: tp)", at_least=1, at_most=1024
    )
    first_stage_layers: int | None = key(
        None, help="layers of the first stage, as --decoder-first-pipeline-num-layers", at_least=1, at_most=100_000
    )
    last_stage_layers: int | None = key(
        None, help="layers of the last stage, as --decoder-last-pipeline-num-layers", at_least=1, at_most=100_000
    )
    dp_last: bool = key(False, help="number ranks by stages before replicas, as --use-tp-pp-dp-mapping does")
    gpus_per_node: int = key(8, help="ranks that share a host", at_least=1, at_most=1024)
    nodes_per_rack: int = key(4, help="hosts that share a rack", at_least=1, at_most=1024)
    racks_per_power_row: int = key(8, help="racks that share a power row", at_least=1, at_most=1024)

    def __post_init__(self) -> None:
        require_valid(self)
        gpus = self.tp * self.pp * self.cp * self.dp
        if gpus > MAX_GPUS:
            raise ConfigError(
                f"tp x pp x cp x dp = {self.tp} x {self.pp} x {self.cp} x {self.dp} is {gpus:,} GPUs",
                fix=f"plan for at most {MAX_GPUS:,}",
            )

    @property
    def expert_parts(self) -> int:
        """Into how many column parts each expert is cut."""
        return self.tp if self.etp is None else self.etp

    def depths(self, layers: int) -> tuple[int, ...]:
        """Return the layers of each stage. Where they do not divide, the first stages whose number is not given have
        one more."""
        first = [] if self.first_stage_layers is None else [self.first_stage_layers]
        last = [] if self.last_stage_layers is None else [self.last_stage_layers]
        stages, rest = self._without_given(layers)
        if stages < 0 or rest < stages or (rest and not stages):
            raise ConfigError(
                f"layers = {layers}: {sum((*first, *last))} of them in the first and the last stage leave {rest} for"
                f" {stages} more of pp = {self.pp} stages",
                fix="give each stage one or more, and each layer a stage",
            )
        return (*first, *(rest // stages + (stage < rest % stages) for stage in range(stages)), *last)

    def require_even_stages(self, layers: int) -> None:
        """Raise if the stages whose layers are not given cannot have alike many."""
        stages, rest = self._without_given(layers)
        if stages > 0 and rest % stages:
            of_others = "" if stages == self.pp else f" less those of the first and the last stage, {rest},"
            raise ConfigError(
                f"layers = {layers}{of_others} is not a multiple of "
                + (f"pp = {self.pp}" if stages == self.pp else f"the other {stages} stages"),
                fix="every stage must hold the same number of layers, but for first_stage_layers and last_stage_layers",
            )
        self.depths(layers)

    def _without_given(self, layers: int) -> tuple[int, int]:
        given = [number for number in (self.first_stage_layers, self.last_stage_layers) if number is not None]
        return self.pp - len(given), layers - sum(given)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The shape of a transformer, in the words of Megatron's arguments."""

    layers: int = key(help="transformer layers", at_least=1, at_most=100_000)
    hidden: int = key(help="hidden size", at_least=1, at_most=10_000_000)
    heads: int = key(help="attention heads", at_least=1, at_most=1_000_000)
    groups: int | None = key(
        None, help="query groups, for GQA (default: as many as heads)", at_least=1, at_most=1_000_000
    )
    kv_channels: int | None = key(
        None, help="channels per head (default: hidden / heads)", at_least=1, at_most=1_000_000
    )
    kv_lora_rank: int | None = key(
        None,
        help="rank of keys and values, for latent attention (default: plain attention)",
        at_least=1,
        at_most=1_000_000,
    )
    q_lora_rank: int | None = key(
        None, help="rank of queries in latent attention (default: not projected down)", at_least=1, at_most=1_000_000
    )
    qk_head_dim: int = key(
        128, help="query channels per latent head, without the rotary ones", at_least=1, at_most=1_000_000
    )
    qk_pos_emb_head_dim: int = key(64, help="rotary channels per latent head", at_least=1, at_most=1_000_000)
    v_head_dim: int = key(128, help="value channels per latent head", at_least=1, at_most=1_000_000)
    ffn: int = key(help="MLP hidden size", at_least=1, at_most=100_000_000)
    vocab: int = key(help="vocabulary size before padding", at_least=1, at_most=100_000_000)
    vocab_multiple: int = key(
        128, help="vocabulary is padded to this times the TP degree", at_least=1, at_most=1_000_000
    )
    seq: int = key(4096, help="tokens per sample", at_least=1, at_most=100_000_000)
    gated: bool = key(True, help="SwiGLU-like MLP with gate and up halves")
    tied: bool = key(False, help="output layer shares the word embedding")
    bias: bool = key(False, help="linear layers have biases")
    experts: int | None = key(None, help="experts of a layer (default: none)", at_least=1, at_most=65_536)
    moe_router_topk: int = key(2, help="experts that a token is sent to", at_least=1, at_most=65_536)
    moe_ffn: int | None = key(
        None, help="hidden size of an expert (default: that of the MLP)", at_least=1, at_most=100_000_000
    )
    moe_shared_expert_ffn: int | None = key(
        None, help="hidden size of all shared experts of a layer together (default: none)", at_least=1
    )
    moe_shared_expert_gate: bool = key(False, help="what a shared expert computes is weighed by a gate")
    moe_layer_freq: str = key(
        "1",
        help="which layers have experts, as Megatron's flag: every N-th, or a pattern: ([0]*3+[1]*58)",
        metavar="FREQ",
    )

    def __post_init__(self) -> None:
        require_valid(self)
        self._require_experts_that_fit()
        if self.q_lora_rank is not None and not self.is_latent:
            raise ConfigError(
                f"q_lora_rank = {self.q_lora_rank} is of latent attention, and kv_lora_rank is missing",
                fix="set kv_lora_rank too, or leave q_lora_rank out",
            )
        if self.is_latent and self.query_groups != self.heads:
            raise ConfigError(
                f"latent attention has no query groups, and groups = {self.groups} is not heads = {self.heads}",
                fix="leave groups out",
            )
        if self.kv_channels is None and not self.is_latent and self.hidden % self.heads:
            raise ConfigError(
                f"hidden = {self.hidden} is not a multiple of heads = {self.heads}",
                fix="change one, or set kv_channels",
            )
        if self.heads % self.query_groups:
            raise ConfigError(
                f"heads = {self.heads} is not a multiple of groups = {self.groups}",
                fix="each query group serves the same number of heads",
            )

    def _require_experts_that_fit(self) -> None:
        if self.experts is None:
            given = {name: getattr(self, name) for name in ("moe_ffn", "moe_shared_expert_ffn")}
            known = [f"{name} = {value}" for name, value in given.items() if value is not None]
            known += [f"moe_layer_freq = {self.moe_layer_freq}"] * (self.moe_layer_freq != "1")
            if known:
                raise ConfigError(f"{known[0]} is of experts, and experts is missing", fix="set experts too")
        elif self.moe_router_topk > self.experts:
            raise ConfigError(
                f"moe_router_topk = {self.moe_router_topk} is above experts = {self.experts}",
                fix=f"choose 1 to {self.experts}",
            )
        if not any(self.expert_layers) and self.experts is not None:
            raise ConfigError(
                f"moe_layer_freq = {self.moe_layer_freq} leaves no layer with experts", fix="leave experts out"
            )

    @property
    def expert_layers(self) -> tuple[bool, ...]:
        """Which layers have experts."""
        if self.experts is None:
            return (False,) * self.layers
        return layers_by_frequency(self.moe_layer_freq, self.layers)

    @property
    def expert_ffn(self) -> int:
        """The hidden size of an expert."""
        return self.ffn if self.moe_ffn is None else self.moe_ffn

    @property
    def query_groups(self) -> int:
        return self.heads if self.groups is None else self.groups

    @property
    def is_latent(self) -> bool:
        """Whether the model has latent attention (Megatron's --multi-latent-attention)."""
        return self.kv_lora_rank is not None

    @property
    def query_channels(self) -> int:
        """Channels of a query or key head."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim if self.is_latent else self.head_channels

    @property
    def value_channels(self) -> int:
        """Channels of a value head."""
        return self.v_head_dim if self.is_latent else self.head_channels

    @property
    def head_channels(self) -> int:
        return self.hidden // self.heads if self.kv_channels is None else self.kv_channels


def require_expert_layout(parallel: Parallel, model: Model) -> None:
    """Raise unless the experts of a model divide over the ranks that are to hold them."""
    parts = parallel.expert_parts
    if model.experts is None:
        known = [f"{name} = {value}" for name, value in (("ep", parallel.ep), ("etp", parallel.etp or 1)) if value > 1]
        if known:
            raise ConfigError(f"{known[0]} is of experts, and the model has none", fix="set experts, or leave it out")
    elif model.experts % parallel.ep:
        raise ConfigError(
            f"experts = {model.experts} is not a multiple of ep = {parallel.ep}",
            fix="every slot must hold the same number of experts",
        )
    elif model.expert_ffn % parts:
        raise ConfigError(
            f"an expert's hidden size of {model.expert_ffn} is not a multiple of etp = {parts}",
            fix="choose an etp that divides it",
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The global batch of one step."""

    micro_batch: int = key(1, help="samples per micro-batch", at_least=1, at_most=1_000_000)
    global_batch: int | None = key(
        None, help="samples per step (default: 16 micro-batches for every replica)", at_least=1, at_most=1_000_000_000
    )

    def micro_batches_per_replica(self, dp: int) -> int:
        """Number of micro-batches that every replica runs in the nominal layout."""
        if self.global_batch is None:
            return 16
        if self.global_batch % (self.micro_batch * dp):
            raise ConfigError(
                f"global_batch = {self.global_batch} is not a multiple of micro_batch x dp = {self.micro_batch} x {dp}",
                fix="the nominal layout needs equal replicas",
            )
        return self.global_batch // (self.micro_batch * dp)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Memory per parameter, whether replicas share optimizer state, and which activations are kept."""

    weight_bytes: int = key(2, help="bytes per parameter of the weights (bf16: 2)", at_least=1, at_most=16)
    gradient_bytes: int = key(
        4, help="bytes per parameter of the gradients (fp32 main gradients: 4)", at_least=1, at_most=16
    )
    optimizer_bytes: int = key(
        12, help="bytes per parameter of optimizer state (Adam with fp32 main: 12)", at_least=0, at_most=64
    )
    distributed_optimizer: bool = key(False, help="optimizer state is sharded over the replicas (ZeRO-1)")
    recompute: bool = key(False, help="of activations only the inputs of layers are kept (full recompute)")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Memory and bandwidth of a GPU; the defaults are an H100 NVL8 host with one 400 Gb/s NIC per GPU."""

    gpu_memory_gb: float | None = key(
        None,
        help="for the job on each GPU: a replica that would need more runs smaller micro-batches, or is refused",
        at_least=0.001,
    )
    nic_gb_per_s: float = key(50.0, help="GB/s of one GPU's NIC, one way", at_least=0.001)
    domain_gb_per_s: float = key(450.0, help="GB/s of one GPU inside the scale-up domain, one way", at_least=0.001)
    lane_launch_us: float = key(
        30.0, help="microseconds that one more collective costs, whatever its size", at_least=0.0
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchPolicy:
    """How the global batch is divided while a replica is degraded."""

    mode: str = key(
        "strict",
        help="strict keeps the global batch; trim drops a little; carry repays it later; shrink takes fewer samples",
        choices=("strict", "trim", "carry", "shrink"),
    )
    epsilon: float = key(
        0.01, help="trim, carry: largest part of the micro-batches that may be left out", at_least=0.0, at_most=0.5
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CopyPolicy:
    """Redundant shards in the memory of this host (near) and of others (far)."""

    mode: str = key(
        "copy",
        help="copy: near and far; xor:N: a far one is the parity of N hosts' copies; near: on the own host alone, which"
        " outlives a process and no host; off: none",
        choices=("copy", "xor:N", "near", "off"),
    )
    count: int = key(1, help="far copies of each shard (0: none)", at_least=0, at_most=8)
    far: str = key("node", help="a far copy is in another one of these", choices=("node", "rack", "power"))
    protect: str = key(
        "unique",
        help="unique copies what data parallelism does not hold twice; all copies everything",
        choices=("unique", "all"),
    )
    lag_steps: int = key(
        0, help="steps that are left out between two copies: a loss costs one more for each", at_least=0, at_most=10_000
    )
    strict: bool = key(True, help="refuse state of which nobody knows what becomes of it when it comes from copies")
    max_host_gb: float | None = key(None, help="refuse copies that take more of a host's memory", at_least=0.000001)
    gb_per_s: float | None = key(None, help="send far copies no faster than this, per process", at_least=0.000001)

    def __post_init__(self) -> None:
        if not self.mode.startswith("xor:"):
            return
        if not 2 <= self.sharers <= MAX_SHARERS:
            raise ConfigError(
                f"copies.mode = {self.mode} has {self.sharers} members share a parity",
                fix=f"xor:2 to xor:{MAX_SHARERS}; a parity of one would be a copy (copies.mode = copy)",
            )
        if self.count != 1:
            raise ConfigError(
                f"copies.count = {self.count} with copies.mode = {self.mode}: there is one parity for each group",
                fix="leave copies.count out, or choose copies.mode = copy",
            )

    @property
    def sharers(self) -> int:
        """Members of each parity; 0 if the copies are whole."""
        kind, _, number = self.mode.partition(":")
        return int(number) if kind == "xor" else 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ActionsPolicy:
    """Which actions a loss may cause, and their expected costs."""

    forbid: tuple[str, ...] = key(
        (), help="what is never done: reduce-tp, move-layers or drop-replica; repeatable", metavar="ACTION"
    )
    restart_s: float | None = key(
        None,
        help="a restart makes the job whole again within so many seconds, steps that are taken again included; a loss"
        " ends the job for one where that is worth it (default: never)",
        at_least=0.0,
    )
    recovery_s: float = key(1.0, help="seconds that the job pauses for a recovery", at_least=0.0)
    repair_s: float = key(432_000.0, help="seconds until what is lost is expected back (default: 5 days)", at_least=1.0)
    failures_per_gpu_day: float = key(
        0.00047, help="how often a GPU fails (default: 419 failures of 16,384 GPUs in 54 days)", at_least=0.0
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The plugin's own block, the same for every framework."""

    enabled: bool = key(False, help="switch the plugin on in a training job", flag="enable")
    min_tp_width: int = key(
        1, help="a stage of a replica narrower than this drops the replica", at_least=1, at_most=1024
    )
    granule: int | None = key(
        None,
        help="MLP columns that stay together (default: 64, 16 or 1, see docs/planning.md)",
        at_least=1,
        at_most=1_000_000,
    )
    route: str = key("auto", help="how gradients cross uneven replicas", choices=("auto", "direct", "via_core"))
    batch: BatchPolicy = subsection(BatchPolicy, prefix="batch-")
    copies: CopyPolicy = subsection(CopyPolicy, prefix="copies-")
    actions: ActionsPolicy = subsection(ActionsPolicy, prefix="actions-")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPolicy(Policy):
    """The same block inside a training job, which can begin without some of its slots."""

    lost: tuple[str, ...] = key(
        (),
        help="slots that are not there from the start: r3.s1.t5, a stage r3.s1; commas separate, repeatable",
        metavar="SLOTS",
    )
    dropout: str = key(
        "auto",
        help="exact: masks that do not depend on the layout, from the start; framework: its own, while nobody is lost;"
        " auto: exact masks if a dropout is above 0, apart from those that kernels of attention draw by themselves",
        choices=("auto", "exact", "framework"),
    )
    watch_steps: int | None = key(
        None,
        help="steps between two comparisons of what all replicas hold alike (0: none; default: as often as watch_cost"
        " allows, and at least every 100 steps)",
        at_least=0,
    )
    watch_cost: float = key(
        0.005,
        help="the share of the step time that comparisons may take, where watch_steps is not given",
        at_least=0.0001,
        at_most=1.0,
    )
    gpu_memory_gb: float | None = key(
        None,
        help="for the job on each GPU: a degraded replica that would need more runs smaller micro-batches (if the loss"
        " is per token), and one that does not fit so goes on without training",
        at_least=0.000001,
    )
    on_sdc: str = key(
        "stop",
        help="where a replica holds other bits than most: stop the job, or heal it: those ranks leave as if they died",
        choices=("stop", "heal"),
    )
    nodes_per_rack: int | None = key(None, help="hosts per rack, where copies.far is rack or power", at_least=1)
    racks_per_power_row: int | None = key(None, help="racks per power row, where copies.far is power", at_least=1)
    events: str | None = key(
        None, help="append what happens to the job to this file, one line of JSON for each event", metavar="FILE"
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainingFile:
    """Content of a file named by `--ntp-config`: the `[ntp]` block."""

    ntp: TrainingPolicy = subsection(TrainingPolicy)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The complete input of `ntp plan`."""

    parallel: Parallel = subsection(Parallel)
    model: Model = subsection(Model)
    batch: Batch = subsection(Batch)
    state: State = subsection(State)
    hardware: Hardware = subsection(Hardware)
    ntp: Policy = subsection(Policy)
    lose: tuple[str, ...] = key(
        (), help="slots lost now: r3.s1.t5, a stage r3.s1, a replica r3, a host node7; repeatable", metavar="SLOTS"
    )
    already: tuple[str, ...] = key((), help="slots that were lost before", metavar="SLOTS")
    back: tuple[str, ...] = key((), help="slots that were lost before and come back now", metavar="SLOTS")

    def __post_init__(self) -> None:
        require_valid(self)
        parallel = self.parallel
        if self.ntp.min_tp_width > parallel.tp:
            raise ConfigError(
                f"min_tp_width = {self.ntp.min_tp_width} is above tp = {parallel.tp}",
                fix=f"choose 1 to {parallel.tp}, or every replica is dropped from the start",
            )
        parallel.require_even_stages(self.model.layers)
        require_expert_layout(parallel, self.model)
        self.batch.micro_batches_per_replica(parallel.dp)
