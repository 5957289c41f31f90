"""The bias of experts (`--moe-router-enable-expert-bias`) in a live job: state that no optimizer steps.

A router counts the tokens of each expert over a step, and Megatron changes the bias by the counts of all replicas when
it finalizes the gradients. A loss may undo the step after that. So the counts are summed there, and the bias is changed
when the vote says that the step is over. It is the same on all ranks of a stage, and recorded with each copy.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter


class ExpertBias:
    """Replaces the update of the bias of all routers of a rank."""

    def __init__(self, chunks: Callable[[], Sequence[Any]], group: Callable[[], Any]) -> None:
        """`chunks` are the model's; `group` returns the ranks that train in this rank's stage, or None if these are
        the ranks of Megatron's own group."""
        self._chunks, self._group = chunks, group
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Each bias, and what it becomes if the step under way is completed."""

    def deferred(self, original: Any) -> Any:
        """`_update_router_expert_bias`: compute the new bias, and keep the present one."""

        @functools.wraps(original)
        def update(model: Any, config: Any, tp_dp_cp_group: Any = None) -> None:
            before = [(bias, bias.clone()) for bias in self._all().values()]
            original(model, config, tp_dp_cp_group=self._group() or tp_dp_cp_group)
            self._pending = [(bias, bias.clone()) for bias, _ in before]
            for bias, was in before:
                bias.copy_(was)

        return update

    def begin_step(self) -> None:
        """Drop what a step that was interrupted has counted."""
        self._pending = []
        for router in self._routers():
            if router.local_tokens_per_expert is not None:
                router.local_tokens_per_expert.zero_()

    def step_is_over(self) -> None:
        """Change the bias by the counts of a step that all ranks have voted on."""
        for bias, value in self._pending:
            bias.copy_(value)
        self._pending = []

    def values(self) -> dict[str, list[float]]:
        """Return the bias of each router, by its name."""
        return {name: [float(value) for value in bias] for name, bias in self._all().items()}

    def set_values(self, values: Mapping[str, Sequence[float]]) -> None:
        """Set the bias of each router."""
        for name, bias in self._all().items():
            bias.copy_(torch.tensor(values[name], dtype=bias.dtype, device=bias.device))

    def _routers(self) -> Iterator[Any]:
        return (module for chunk in self._chunks() for module in chunk.modules() if isinstance(module, TopKRouter))

    def _all(self) -> dict[str, torch.Tensor]:
        return {
            f"{number}.{name}": module.expert_bias
            for number, chunk in enumerate(self._chunks())
            for name, module in chunk.named_modules()
            if isinstance(module, TopKRouter) and module.expert_bias is not None
        }
