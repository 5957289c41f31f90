"""Sends activations and gradients between stages of different width.

Megatron's schedules send a stage's activations to the next rank of their pipeline group, and gradients to the one
before. Without sequence parallelism all slots of a stage have the same values, bit for bit, so each receives them from
one slot of the other stage: its column's (`layout.py`). If slots are lost, one slot is in several columns and sends
several times; if the receiver is lost, nobody sends. With sequence parallelism each slot has rows of its own, and sends
to every slot of the other stage the rows that both have (`planning/sequence_rows.py`); its pads stay zero. The
schedules and the buffers stay Megatron's; only the operations that they start are the plugin's.

All go through the group of the full replica, since two ranks need not share a column with a third. Between two ranks, a
tag separates activations from gradients, if the backend has tags (gloo). NCCL has none, and matches operations by the
order in which both sides start them: the parity of its stage decides whether a slot starts with what it sends forward,
or with what the other sends forward, as in Megatron.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from ntp_plugin.megatron.job_shape import rows_of_slots
from ntp_plugin.megatron.layout import Layout
from ntp_plugin.megatron.stage_links import Link, Links

_FORWARD, _BACKWARD = 0, 1


class Handles:
    """Several operations that are waited for as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()


class Pipeline:
    """Replaces the functions by which Megatron starts to send and receive."""

    def __init__(self, layout: Layout, args: Any) -> None:
        rows = functools.partial(rows_of_slots, args) if args.sequence_parallel else None
        links = Links(layout, rows=rows)
        self._from_before, self._from_after = links.senders(links.before), links.senders(links.after)
        self._to_before, self._to_after = links.receivers(links.before), links.receivers(links.after)
        self._even = layout.stages.index(layout.slot.stage) % 2 == 0

    def batched(self, _: Any) -> Any:
        """`_batched_p2p_ops`: start all at once."""

        def begin(**kwargs: Any) -> list[Any]:
            ops = [op for _, group in self._operations(**kwargs) for op in group]
            return dist.batch_isend_irecv(ops) if ops else []

        return begin

    def one_by_one(self, _: Any) -> Any:
        """`_p2p_ops`: start each, to be waited for by its name."""

        def begin(**kwargs: Any) -> dict[str, Handles]:
            return {
                name: Handles([op.op(op.tensor, op.peer, op.group, op.tag) for op in ops])
                for name, ops in self._operations(**kwargs)
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
        """Yield the operations by Megatron's names, in the order in which they must start."""
        send, receive = dist.isend, dist.irecv
        todo = [
            ("send_next", send, tensor_send_next, self._to_after, _FORWARD),
            ("recv_prev", receive, tensor_recv_prev, self._from_before, _FORWARD),
            ("send_prev", send, tensor_send_prev, self._to_before, _BACKWARD),
            ("recv_next", receive, tensor_recv_next, self._from_after, _BACKWARD),
        ]
        if not self._even:
            todo = [todo[1], todo[0], todo[3], todo[2]]
        group = parallel_state.get_model_parallel_group()
        for name, act, tensor, links, tag in todo:
            if tensor is None:
                continue
            values = tensor.detach()
            if act is receive:
                _clear_pads(values, links)
            yield name, [dist.P2POp(act, values[link.rows], link.peer, group, tag) for link in links]


def _clear_pads(values: torch.Tensor, links: Sequence[Link]) -> None:
    """Zero the pads, which nobody sends: norms must compute nothing from them."""
    filled = max((len(values) if link.rows.stop is None else link.rows.stop for link in links), default=0)
    values[filled:].zero_()
