"""Sends tokens to experts that are not spread evenly: the dispatcher of an expert group that has lost slots.

Megatron's dispatchers number the experts so that each rank of a group has as many as the others, in order. Here a rank
has any number of them, in any order (`planning/expert_groups.py`). Every token goes to each of its experts by one
exchange among the ranks that are left, and comes back by another, whichever `--moe-token-dispatcher-type` the job has.

With expert tensor parallelism a slot has a part of an expert's columns, and the parts may be on any slots. A token goes
to all parts of its expert, and the parts' results are summed with those of its other experts.
"""

import dataclasses
from typing import Any

import torch
from megatron.core.tensor_parallel import all_to_all, gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs, unpermute
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertPlaces:
    """The experts of each rank of an expert group, in the order in which the rank stores them."""

    of_ranks: tuple[tuple[tuple[int, int], ...], ...]
    """Rank of the group -> its experts, as (nominal place, number among those of the place)."""
    own: int
    """This rank in the group."""
    each: int
    """Nominal number of experts of a place."""
    column_parts: int
    """How many places share the columns of an expert."""

    @property
    def mine(self) -> tuple[tuple[int, int], ...]:
        return self.of_ranks[self.own]

    def numbers(self) -> list[int]:
        """Return the number that the router knows each expert by, rank after rank."""
        return [place // self.column_parts * self.each + number for mine in self.of_ranks for place, number in mine]


class UnevenDispatcher(MoETokenDispatcher):  # type: ignore[misc]
    """Replaces the dispatcher of one MoE layer."""

    def __init__(self, places: ExpertPlaces, group: Any, *, config: Any, pg_collection: Any) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self._group, self._places = group, places
        self._numbers = torch.tensor(places.numbers())
        self._sizes = [len(experts) for experts in places.of_ranks]
        ranks, mine = len(self._sizes), self._sizes[places.own]
        self._by_expert = torch.arange(ranks * mine).view(ranks, mine).T.ravel()
        self._by_rank = torch.arange(ranks * mine).view(mine, ranks).T.ravel()

    def dispatch_preprocess(self, tokens: Any, routing_map: Any, probs: Any) -> Any:
        """Count the tokens for each expert, and put them in the order of the ranks that hold these."""
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(tokens)
        self._shape = tokens.shape
        tokens = tokens.view(-1, tokens.shape[-1])
        numbers = self._numbers.to(routing_map.device)
        self._tokens_shape, self._map = tokens.shape, routing_map[:, numbers]
        counts = self._map.sum(0)
        gathered = gather_from_sequence_parallel_region(counts, group=self._group).view(len(self._sizes), -1).cpu()
        first = sum(self._sizes[: self._places.own])
        self._received = gathered[:, first : first + self._sizes[self._places.own]].contiguous()
        self._sent = [int(one.sum()) for one in torch.split(gathered[self._places.own], self._sizes)]
        tokens, probs, self._order, _, _ = permute(
            tokens,
            self._map,
            probs=probs[:, numbers],
            num_out_tokens=sum(self._sent),
            fused=self.config.moe_permute_fusion,
        )
        return tokens, probs

    def token_dispatch(self, tokens: Any, probs: Any) -> Any:
        """Send tokens, with their probabilities, to the ranks that hold their experts."""
        arriving = self._received.sum(1).tolist()
        tokens = all_to_all(self._group, tokens, arriving, self._sent)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(tokens)
        return tokens, all_to_all(self._group, probs, arriving, self._sent)

    def dispatch_postprocess(self, tokens: Any, probs: Any) -> Any:
        """Put the tokens in the order of this rank's experts."""
        tokens, probs = sort_chunks_by_idxs(
            tokens, self._received.ravel(), self._by_expert, probs=probs, fused=self.config.moe_permute_fusion
        )
        return tokens, self._received.sum(0), probs

    def combine_preprocess(self, hidden_states: Any) -> Any:
        """Put the results in the order of the ranks that sent the tokens."""
        results, _ = sort_chunks_by_idxs(
            hidden_states, self._received.T.ravel(), self._by_rank, fused=self.config.moe_permute_fusion
        )
        return results

    def token_combine(self, hidden_states: Any) -> Any:
        """Send the results back."""
        results = all_to_all(self._group, hidden_states, self._sent, self._received.sum(1).tolist())
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(results)
            self.shared_experts.post_forward_comm()
        return results

    def combine_postprocess(self, hidden_states: Any) -> Any:
        """Sum the results of each token."""
        summed = unpermute(
            hidden_states,
            self._order,
            restore_shape=self._tokens_shape,
            routing_map=self._map,
            fused=self.config.moe_permute_fusion,
        )
        output = summed.view(self._shape)
        return output if self.shared_experts is None else output + self.shared_experts.get_output()
