"""Options of layers of experts that a degraded layout does not support.

With experts a replica that has lost a slot trains no longer, and its experts are dealt to the other slots of its expert
group. What depends on how many tokens a rank has, such as Sinkhorn routing and capacities, stays as it is.
"""

from collections.abc import Callable
from typing import Any

from ntp_plugin.megatron.refusals import Refusal, above, given, not_built, not_planned

_has_experts = given("num_experts")


def _with_experts(applies: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda args: _has_experts(args) and applies(args)


def _balances_by(kind: str) -> Callable[[Any], object]:
    return lambda args: kind in str(getattr(args, "moe_router_load_balancing_type", ""))


EXPERTS: tuple[Refusal, ...] = (
    not_built("--fp8-format with --num-experts", _with_experts(given("fp8")), fix="leave --fp8-format out"),
    Refusal(
        flag="--moe-router-load-balancing-type",
        applies=_with_experts(_balances_by("global_aux_loss")),
        why="global_aux_loss counts tokens over all replicas after each micro-batch, and they run different numbers",
        fix="--moe-router-load-balancing-type aux_loss or seq_aux_loss",
    ),
    Refusal(
        flag="--moe-router-load-balancing-type",
        applies=_with_experts(_balances_by("quantile_balancing")),
        why="quantile_balancing takes means over replicas, which run different numbers of micro-batches",
        fix="--moe-router-load-balancing-type aux_loss or seq_aux_loss",
    ),
    *(
        Refusal(
            flag=flag,
            applies=_with_experts(given(flag.removeprefix("--").replace("-", "_"))),
            why="draws random numbers in the router, and another layout draws others",
            fix=f"leave {flag} out",
        )
        for flag in ("--moe-input-jitter-eps", "--moe-router-force-load-balancing", "--moe-router-force-biased")
    ),
    *(
        not_built(flag, _with_experts(given(flag.removeprefix("--").replace("-", "_"))))
        for flag in (
            *("--moe-enable-routing-replay", "--moe-latent-size"),
            *("--moe-paged-stash", "--moe-single-grouped-weight", "--moe-single-grouped-bias"),
            *("--moe-use-upcycling", "--save-tokens-per-expert-interval"),
            "--overlap-dispatch-backward-with-experts-wgrad",
            *("--use-grouped-gemm-for-shared-expert", "--moe-shared-expert-glu-interleave-size"),
            *("--use-grouped-gemm-for-dense-mlp", "--moe-mlp-glu-interleave-size", "--moe-enable-deepep"),
            *("--moe-router-padding-for-quantization", "--moe-router-padding-for-fp8", "--moe-routing-trace-path"),
            "--moe-expert-rank-capacity-factor",
        )
    ),
    not_built(
        "--moe-flex-dispatcher-backend",
        _with_experts(lambda args: getattr(args, "moe_flex_dispatcher_backend", "") == "ncclep"),
        fix="--moe-flex-dispatcher-backend deepep or hybridep",
    ),
)
"""What is refused beside `unsupported.TABLE`."""

NO_MEMORY_LIMIT = Refusal(
    flag="--num-experts with --ntp-gpu-memory-gb",
    applies=_has_experts,
    why="may split a micro-batch where memory is short, and the losses of routers are of whole ones",
    fix="leave --ntp-gpu-memory-gb out; `ntp plan` has the memory of such a job",
)
"""What is refused beside `unsupported.MEMORY_LIMIT`."""

EXPERTS_PLANNED: tuple[Refusal, ...] = (
    not_planned("--num-experts", _has_experts),
    not_planned("--expert-model-parallel-size", above("expert_model_parallel_size")),
)
"""What a job that begins degraded does not support."""
