"""Activations and their gradients between stages of different width.

Megatron's schedules send what a stage has made to the next rank of their pipeline group, and gradients to the one
before. Without sequence parallelism all slots of a stage have made the same, bit for bit, so each needs to receive it
from one slot of the other stage: its column's (`layout.py`). Where slots are lost, one slot is in several columns and
sends several times; where the receiver is lost, nobody sends. The schedules and the buffers stay Megatron's; only the
operations that they start are ours.

All go through the group of the whole replica, since a pair of ranks need not have a column in common with a third.
Between two ranks activations and gradients are told apart by a tag, where the backend has tags (gloo). NCCL has none,
and matches by the order in which both sides start: each starts with what it sends forward, or with what the other
sends forward, by the parity of its stage, as Megatron does.

Sequence parallelism would need more: slots hold different rows then, and a receiver needs those of several senders.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from ntp_plugin.megatron.layout import Layout

_FORWARD, _BACKWARD = 0, 1


class Handles:
    """Several operations that are waited for as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Have all of them done."""
        for work in self._works:
            work.wait()


class Pipeline:
    """What is put in place where Megatron starts to send and receive."""

    def __init__(self, layout: Layout) -> None:
        stage, stages = layout.slot.stage, layout.topology.pp
        column = layout.column(layout.slot.replica, layout.slot.tp)
        before, after = (stage - 1) % stages, (stage + 1) % stages
        self._before, self._after = layout.ranks[column[before]], layout.ranks[column[after]]
        self._fed_forward = [layout.ranks[slot] for slot in layout.receivers(after)]
        self._fed_backward = [layout.ranks[slot] for slot in layout.receivers(before)]
        self._even = stage % 2 == 0

    def batched(self, _: Any) -> Any:
        """`_batched_p2p_ops`: all at once."""

        def begin(**said: Any) -> list[Any]:
            ops = [op for _, group in self._operations(**said) for op in group]
            return dist.batch_isend_irecv(ops) if ops else []

        return begin

    def one_by_one(self, _: Any) -> Any:
        """`_p2p_ops`: each can be waited for by its name."""

        def begin(**said: Any) -> dict[str, Handles]:
            return {
                name: Handles([op.op(op.tensor, op.peer, op.group, op.tag) for op in ops])
                for name, ops in self._operations(**said)
            }

        return begin

    def _operations(
        self,
        *,
        tensor_send_prev: torch.Tensor | None,
        tensor_recv_prev: torch.Tensor | None,
        tensor_send_next: torch.Tensor | None,
        tensor_recv_next: torch.Tensor | None,
        **_: Any,
    ) -> Iterator[tuple[str, list[dist.P2POp]]]:
        """By Megatron's names, in the order in which they are to be started."""
        send, receive = dist.isend, dist.irecv
        todo = [
            ("send_next", send, tensor_send_next, self._fed_forward, _FORWARD),
            ("recv_prev", receive, tensor_recv_prev, [self._before], _FORWARD),
            ("send_prev", send, tensor_send_prev, self._fed_backward, _BACKWARD),
            ("recv_next", receive, tensor_recv_next, [self._after], _BACKWARD),
        ]
        if not self._even:
            todo = [todo[1], todo[0], todo[3], todo[2]]
        group = parallel_state.get_model_parallel_group()
        for name, act, tensor, peers, tag in todo:
            if tensor is not None:
                yield name, [dist.P2POp(act, tensor, peer, group, tag) for peer in peers]
