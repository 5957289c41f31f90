"""Dropout masks that do not depend on the layout (`training/dropout.py`).

Three things must be known when a mask is drawn.

Which dropout it is. Once the model is built, the plugin goes through its modules: the dropout of an embedding, the one
of an attention's weights, and everything that was built to be `get_bias_dropout_add` in a layer with a number. It
refuses a dropout of any other kind, and two with one name. Megatron numbers layers over all stages. TransformerEngine's
attention is not changed: its kernels draw by themselves.

Which heads and rows. A slot knows the query groups that it holds. Under sequence parallelism it has a part of the rows
between the parallel layers, where all slots store the same number of rows, in order; otherwise it has all rows of its
replica. With context parallelism a replica has two parts of the sequence, one counted from each end.

Which samples. They are numbered in the order of training: the samples before this step, plus the position of the
micro-batch in the global batch. Megatron's schedules run the forward of a model chunk's micro-batches in order, so the
function that begins one can count them. Where exchanges of tokens overlap another micro-batch, that function only plans
the forward, which is computed beside the backward of another one, and ends before the next one begins. The number then
becomes part of Megatron's random state, which every kind of recomputation saves and restores: so a micro-batch that is
recomputed among others draws its own masks again. If no number is known, no mask is drawn, and an error says so.
"""

import collections
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.extensions import transformer_engine as te
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.dot_product_attention import DotProductAttention

from ntp_plugin.errors import Refused
from ntp_plugin.megatron.layout import Layout
from ntp_plugin.megatron.unsupported import attention_draws_by_itself
from ntp_plugin.planning.units import ATTENTION, Family
from ntp_plugin.training.dropout import dropout, row_keys, stream

_LOG = logging.getLogger(__name__)

type Firsts = Callable[[int], Sequence[int]]
"""The first sample of each of this replica's micro-batches in the global batch, given its nominal number of them."""


class ExactDropout:
    """Replaces the dropouts, and tracks which samples they see."""

    def __init__(self, layout: Layout, args: Any, firsts: Firsts, *, strict: bool) -> None:
        """`strict`: whether to raise for a dropout of an unknown kind, which else draws by itself as before."""
        self._args, self._strict = args, strict
        self._unknown = set[str]()
        self.stand_in(layout, firsts)
        self._first: int | None = None
        """The number of the first sample of the current micro-batch."""
        if attention_draws_by_itself(args) and layout.rank == 0:
            _LOG.warning(
                "--attention-dropout %s: TransformerEngine's kernels draw these masks by themselves, so after a loss"
                " they are others than without one. All other masks are exact (--ntp-dropout)",
                args.attention_dropout,
            )

    def stand_in(self, layout: Layout, firsts: Firsts) -> None:
        """Draw for this layout from now on."""
        self._layout, self._firsts = layout, firsts
        self._place = layout.survivors.index(layout.slot.tp)
        sharing = layout.surviving.sharing(layout.context)
        self._context_place = sharing.index(layout.slot.replica), len(sharing)

    # ------------------------------------------------ which samples

    def schedule(self, original: Any) -> Any:
        """`get_forward_backward_func`."""

        @functools.wraps(original)
        def get(*args: Any, **kwargs: Any) -> Any:
            return functools.partial(self._run, original(*args, **kwargs))

        return get

    def _run(self, run: Any, *, forward_step_func: Any, num_microbatches: int, **kwargs: Any) -> Any:
        if not kwargs.get("forward_only"):
            forward_step_func = self._numbered(forward_step_func, num_microbatches)
        try:
            return run(forward_step_func=forward_step_func, num_microbatches=num_microbatches, **kwargs)
        finally:
            self._first = None

    def _numbered(self, forward_step: Any, count: int) -> Any:
        firsts = [self._args.consumed_train_samples + first for first in self._firsts(count)]
        coming: dict[int, Iterator[int]] = collections.defaultdict(lambda: iter(firsts))

        @functools.wraps(forward_step)
        def numbered(samples: Any, chunk: Any, *args: Any, return_schedule_plan: bool = False) -> Any:
            self._first = next(coming[id(chunk)], None)
            if return_schedule_plan:  # its layers are computed later, all of them before the next one begins
                return forward_step(samples, chunk, *args, return_schedule_plan=True)
            try:
                return forward_step(samples, chunk, *args)
            finally:
                self._first = None

        return numbered

    def random_state(self, original: Any) -> Any:
        """`_get_all_rng_states`."""

        @functools.wraps(original)
        def get() -> tuple[Any, ...]:
            return (*original(), self._first)

        return get

    def put_back(self, original: Any) -> Any:
        """`_set_all_rng_states`."""

        @functools.wraps(original)
        def put(*states: Any) -> None:
            *stock, self._first = states
            original(*stock)

        return put

    # ------------------------------------------------ which dropout

    def model(self, original: Any) -> Any:
        """`setup_model_and_optimizer`."""

        @functools.wraps(original)
        def setup(*args: Any, **kwargs: Any) -> Any:
            chunks, *rest = original(*args, **kwargs)
            self.into(chunks)
            return chunks, *rest

        return setup

    def into(self, chunks: Iterable[torch.nn.Module]) -> None:
        """Replace all dropouts of a model."""
        names: set[tuple[str, int]] = set()
        for chunk in chunks:
            for where, module in _not_in_kernels(chunk):
                for name in self._take_over(module, where):
                    if name in names:
                        raise _unknown(f"{where} has the name {name} of another dropout")
                    names.add(name)

    def _take_over(self, module: Any, where: str) -> Iterator[tuple[str, int]]:
        """Replace the dropouts that a module holds itself, and yield their names."""
        for attribute, value in (*vars(module).items(), *module.named_children()):
            name = (attribute, getattr(module, "layer_number", 0))
            which = stream(self._args.seed, *name)
            if value is get_bias_dropout_add and name[1]:
                setattr(module, attribute, functools.partial(self._bias_dropout_add, which))
            elif isinstance(value, torch.nn.Dropout) and isinstance(module, DotProductAttention):
                _have_drop(value, self.over_heads, which)
            elif isinstance(value, torch.nn.Dropout) and isinstance(module, LanguageModelEmbedding):
                _have_drop(value, self.over_rows, which)
            elif value is get_bias_dropout_add or (isinstance(value, torch.nn.Dropout) and value.p):
                self._keep(f"{where}.{attribute} is an unknown kind of dropout")
                continue
            else:
                continue
            yield name

    def _keep(self, what: str) -> None:
        if self._strict:
            raise _unknown(what)
        if self._layout.rank == 0 and what not in self._unknown:
            _LOG.warning("%s: its masks after a loss are others than without one (--ntp-dropout)", what)
        self._unknown.add(what)

    def _bias_dropout_add(self, which: int, training: bool, fused: bool) -> Any:
        """`get_bias_dropout_add` of one layer."""
        if not training:
            return get_bias_dropout_add(training, fused)

        def add(x_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, p: float) -> Any:
            x, bias = x_with_bias
            if x.dtype != residual.dtype:
                x, bias = x.to(residual.dtype), None if bias is None else bias.to(residual.dtype)
            return residual + self.over_rows(which, x if bias is None else x + bias, p)

        return add

    # ------------------------------------------------ which heads and rows

    def over_rows(self, which: int, x: torch.Tensor, p: float) -> torch.Tensor:
        """Apply dropout to [row of the sequence, sample, hidden]."""
        rows, samples, _ = x.shape
        first = self._place * rows if self._args.sequence_parallel else 0
        here = torch.arange(first, first + rows, device=x.device)
        keys = row_keys(which, self._samples(samples, x.device), self._in_the_sequence(here))
        return dropout(x, p, keys.T)

    def _in_the_sequence(self, rows: torch.Tensor) -> torch.Tensor:
        """Return where rows of this replica are in the whole sequence."""
        place, degree = self._context_place
        if degree == 1:
            return rows
        each = self._args.seq_length // (2 * degree)
        return rows + torch.where(rows < each, place * each, (2 * degree - 2 - place) * each)

    def over_heads(self, which: int, x: torch.Tensor, p: float) -> torch.Tensor:
        """Apply dropout to [sample, this slot's heads, query, key]."""
        samples, _, rows, _ = x.shape
        places = self._samples(samples, x.device), self._heads(x.device), torch.arange(rows, device=x.device)
        return dropout(x, p, row_keys(which, *places))

    def _samples(self, count: int, device: torch.device) -> torch.Tensor:
        if self._first is None:
            raise Refused(
                "a dropout is computed outside of a micro-batch of training, so its mask is not known",
                fix="model.eval() before it, or --ntp-dropout framework",
            )
        return torch.arange(self._first, self._first + count, device=device)

    def _heads(self, device: torch.device) -> torch.Tensor:
        """Return the model's heads that this slot holds, in order."""
        args = self._args
        groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
        each = args.num_attention_heads // groups
        held = self._layout.held(Family(name=ATTENTION, units=groups))
        return torch.cat([torch.arange(start * each, stop * each, device=device) for start, stop in held])


def _not_in_kernels(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules of a model without those inside of TransformerEngine's attention."""
    inside: list[str] = []
    for where, module in chunk.named_modules():
        if te.HAVE_TE and isinstance(module, te.TEDotProductAttention):
            inside.append(f"{where}.")
        elif not where.startswith(tuple(inside)):
            yield where, module


def _have_drop(module: torch.nn.Dropout, over: Callable[[int, torch.Tensor, float], torch.Tensor], which: int) -> None:
    """Replace only the forward: hooks of others may be on the module, as DDP has when parameters arrive late."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return over(which, x, module.p) if module.training else x

    setattr(module, "forward", forward)  # noqa: B010  (a plain assignment is not for methods)


def _unknown(what: str) -> Refused:
    return Refused(f"--ntp-dropout exact: {what}", fix="--ntp-dropout framework, and no dropout in a degraded layout")
