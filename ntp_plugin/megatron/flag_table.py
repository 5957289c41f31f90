"""Writes the page that has every flag of Megatron's parser which touches training: it works, it works and changes in a
degraded layout, or it is unsupported.

    python -m ntp_plugin.megatron.flag_table docs/megatron-flags.md        or   make megatron-flags

The page follows from the parser of the installed Megatron, from the tables of `unsupported.py`, and from
`degraded_changes.py`. A test compares the page with what this module would write, so that it cannot become stale.
"""

import argparse
import copy
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ntp_plugin.megatron import recipe_check
from ntp_plugin.megatron.degraded_changes import CHANGES
from ntp_plugin.megatron.refusals import Refusal
from ntp_plugin.megatron.unsupported import EXACT_MASKS, LIVE, MEMORY_LIMIT, PLANNED, TABLE

WORKS, CHANGED, UNSUPPORTED = "works", "works, and changes", "unsupported"
_ORDER = (UNSUPPORTED, CHANGED, WORKS)
_WIDTH = 24
"""Most flags in a cell."""

NOT_TRAINING = frozenset(
    {
        "positional arguments",
        "options",
        "inference",
        "biencoder",
        "vision",
        "autoresume",
        "one logger",
        "fault injector",
    }
    | {"workload inspector", "msc", "ntp"}
)
"""Groups of the parser that do not touch training, and the plugin's own. Their unsupported flags are listed anyway."""

FOR_INFERENCE = ("--inference-", "--flash-decode", "--nccl-all-reduce-for-prefill", "--mlp-chunks-for-prefill")
"""How flags for inference begin that are in other groups."""

OLD_NAMES = frozenset(
    {"--batch-size", "--warmup", "--model-parallel-size", "--checkpoint-activations", "--no-position-embedding"}
)
"""Flags with which Megatron itself ends."""

CONDITIONS = {
    "--num-query-groups": "a query group stays whole, so they must divide over the TP slots; without"
    " --group-query-attention the same holds for --num-attention-heads",
    "--ffn-hidden-size": "must divide over the TP slots in granules (--ntp-granule)",
    "--seq-length": "with --sequence-parallel, a batch of another length is refused",
    "--optimizer": "`muon` is accepted where no loss makes a replica narrower (TP 1, --ntp-min-tp-width of the TP"
    " degree, experts, context parallelism), and without --use-distributed-optimizer",
    "--muon-tp-mode": "at TP > 1, other modes than blockwise are refused",
    "--spec": "layers cut over the TP group that the plugin does not know are refused when the model is built",
}
"""Flags that are refused by more than their value, outside of the tables of `unsupported.py` (`option_checks.py`)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FlagFamily:
    """Flags that have an effect only with another one: unsupported as long as that one is.

    Attributes:
        leader: The flag of its row in `unsupported.py`.
        prefixes: How the flags of the family begin.
        value: The value of the leader with which they have an effect, if not all have.
    """

    leader: str
    prefixes: tuple[str, ...]
    value: str | None = None


def _family(leader: str, prefixes: str, *, value: str | None = None) -> FlagFamily:
    return FlagFamily(leader=leader, prefixes=tuple(prefixes.split()), value=value)


FAMILIES: tuple[FlagFamily, ...] = (
    _family("--moe-flex-dispatcher-backend", "--moe-ncclep-", value="ncclep"),
    _family("--moe-router-load-balancing-type", "--moe-router-quantile-", value="quantile_balancing"),
    _family("--moe-routing-trace-path", "--moe-routing-trace-"),
    _family("--moe-paged-stash", "--moe-paged-stash-"),
    _family("--moe-use-upcycling", "--moe-upcycling-"),
    _family("--hybrid-context-parallel", "--max-seqlen-per-dp-cp-rank"),
    _family("--fp8-recipe", "--fp8-output-proj --reuse-grad-buf-for-mxfp8-", value="mxfp8"),
    _family("--fp8-recipe", "--fp8-quantizer-", value="custom"),
    _family("--first-last-layers-bf16", "--num-layers-at-"),
    _family("--use-megatron-fsdp", "--keep-fp8-"),
    _family("--fp4-format", "--fp4-"),
    _family("--experimental-attention-variant", "--dsa- --no-dsa-", value="dsa"),
    _family("--hybrid-layer-pattern with M (Mamba)", "--mamba- --disable-mamba-"),
    _family(
        "--use-megatron-fsdp",
        "--megatron-fsdp- --fsdp- --data-parallel-sharding- --outer-dp- --enable-full-sharding-"
        " --suggested-communication- --no-strict-fsdp- --create-all-gather-group",
    ),
    _family("--use-torch-fsdp2", "--torch-fsdp2-"),
    _family("--cuda-graph-impl", "--cuda-graph-"),
    _family("--tp-comm-overlap", "--tp-comm- --no-tp-comm-"),
    _family("--fp16", "--loss-scale --initial-loss-scale --min-loss-scale --hysteresis --fp16-"),
    _family(
        "--optimizer-cpu-offload",
        "--optimizer-offload- --use-torch-optimizer-for-cpu- --overlap-cpu-optimizer- --no-pin-cpu-",
    ),
    _family("--use-precision-aware-optimizer", "--main-grads- --main-params- --exp-avg-"),
    _family("--optimizer", "--muon-", value="muon"),
    _family("--optimizer", "--lion-", value="lion"),
    _family("--qk-clip", "--qk-clip-"),
    _family("--non-persistent-save-interval", "--non-persistent-"),
    _family("--ckpt-convert-format", "--ckpt-convert-"),
    _family("--inprocess-restart", "--inprocess-"),
    _family("--cpu-offloading-num-layers", "--cpu-offloading-"),
    _family(
        "--fine-grained-activation-offloading",
        "--offload-modules --min-offloaded- --delay-offload- --delta-offload- --activation-offload-"
        " --fine-grained-offloading-",
    ),
    _family("--use-kitchen-attention", "--kitchen-"),
    _family("--logits-save-dir", "--logits-save-"),
    _family("--logits-load-dir", "--logits-load-"),
    _family("--log-straggler", "--straggler- --disable-straggler-"),
    _family("--sft", "--sft-"),
    _family("--perform-rl-step", "--rl- --grpo- --langrl- --refit-"),
    _family("--defer-embedding-wgrad-compute", "--wgrad-deferral-"),
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, order=True)
class FlagStatus:
    """What becomes of a flag, and why."""

    status: str
    text: str = ""


# ---------------------------------------------------------------- one flag


def flag_of(action: argparse.Action) -> str:
    """Return the first long name of an option."""
    return next((name for name in action.option_strings if name.startswith("--")), action.dest)


def status_of(action: argparse.Action, base: Any) -> FlagStatus:
    """Return what becomes of a flag.

    Args:
        action: The flag as the parser has it.
        base: Megatron's default arguments, of a job with checkpoints and FP8.
    """
    flag = flag_of(action)
    rows = [row for row in (*TABLE, *MEMORY_LIMIT, *LIVE) if row.flag.split()[0] in action.option_strings]
    changes = [_sentence(change.change) for change in CHANGES if change.flag == flag]
    condition = [_sentence(CONDITIONS[flag])] if flag in CONDITIONS else []
    if rows:
        found = _unsupported(rows, action, base)
        text = ". ".join((found.text, *changes, *condition))
        return found if found.status == UNSUPPORTED else dataclasses.replace(found, text=text)
    family = next((family for family in FAMILIES if _is_in(flag, family) and _is_refused(family, base)), None)
    if family is not None:
        value = f" {family.value}" if family.value else ""
        return FlagStatus(status=UNSUPPORTED, text=f"goes with {_code(family.leader + value)}")
    if flag in OLD_NAMES:
        return FlagStatus(status=UNSUPPORTED, text="Megatron itself refuses this old name")
    texts = changes + [f"In a job that begins degraded it {row.why}" for row in PLANNED if row.flag == flag]
    texts += [f"With dropout above 0 unsupported: {row.why}" for row in EXACT_MASKS if row.flag == flag]
    texts += condition
    return FlagStatus(status=CHANGED, text=". ".join(texts)) if texts else FlagStatus(status=WORKS)


def _is_in(flag: str, family: FlagFamily) -> bool:
    return flag.startswith(family.prefixes) and flag != family.leader


def _is_refused(family: FlagFamily, base: Any) -> bool:
    """Whether the leader of a family is still in the tables, with its value."""
    rows = [row for row in (*TABLE, *LIVE) if row.flag == family.leader]
    if family.value is None:
        return bool(rows)
    return any(
        row.applies(_with(base, family.leader.removeprefix("--").replace("-", "_"), family.value)) for row in rows
    )


def _unsupported(rows: Sequence[Refusal], action: argparse.Action, base: Any) -> FlagStatus:
    """Return which values of a flag are refused, and why."""
    why, fix = rows[0].why, rows[0].fix
    parts = [row.flag.partition(" with ")[2] for row in rows if " with " in row.flag]
    if parts:
        return FlagStatus(status=CHANGED, text=f"Unsupported with {', '.join(parts)}: {why}")
    values = _values(action)
    refused = [value for value in values if any(row.applies(_with(base, action.dest, value)) for row in rows)]
    if not refused or len(refused) == len(values):
        instead = "" if fix.startswith("leave ") else f". Instead: {fix}"
        return FlagStatus(status=UNSUPPORTED, text=_sentence(why) + instead)
    return FlagStatus(status=CHANGED, text=f"Unsupported: {', '.join(map(_code, refused))}: {why}")


def _values(action: argparse.Action) -> list[Any]:
    """Return values that a user could give, enough to tell which are refused."""
    if action.choices is not None:
        return list(action.choices)
    if action.nargs == 0:
        return [action.const]
    return [1, 2] if action.type in (int, float) else ["x"]


def _with(base: Any, name: str, value: Any) -> Any:
    args = copy.copy(base)
    setattr(args, name, value)
    return args


# ---------------------------------------------------------------- the page


def page(parser: argparse.ArgumentParser) -> str:
    """Return the page of a parser's flags."""
    base = parser.parse_args([])
    base.save = base.load = "checkpoints"
    base.fp8, base.num_experts = "hybrid", 8
    listed, others = [], []
    for group in parser._action_groups:
        statuses = {
            flag_of(action): status_of(action, base)
            for action in group._group_actions
            if not flag_of(action).startswith(FOR_INFERENCE)
        }
        if group.title in NOT_TRAINING:
            others += [str(group.title)] if group.title not in ("positional arguments", "options", "ntp") else []
            statuses = {flag: found for flag, found in statuses.items() if found.status == UNSUPPORTED}
        if statuses:
            listed.append((str(group.title), statuses))
    counts = _counts(found for _, statuses in listed for found in statuses.values())
    sections = "".join(_section(title, statuses) for title, statuses in listed)
    return _HEAD.format(counts=counts, others=", ".join(others)) + sections + _FOOT


def _counts(statuses: Iterable[FlagStatus]) -> str:
    found = [status.status for status in statuses]
    return "\n".join(f"| {_MEANING[status]} | {found.count(status)} |" for status in _ORDER)


def _section(title: str, statuses: dict[str, FlagStatus]) -> str:
    rows = [
        f"| {cell} | {found.status} | {_escaped(found.text)} |"
        for status in _ORDER
        for cell, found in _cells({flag: found for flag, found in statuses.items() if found.status == status})
    ]
    return "\n".join(["", f"## {_titled(title)}", "", "| flags | | in a degraded layout |", "|---|---|---|", *rows, ""])


def _cells(statuses: dict[str, FlagStatus]) -> Iterator[tuple[str, FlagStatus]]:
    """Yield flags of which the same is true, some in one cell."""
    for found in dict.fromkeys(statuses.values()):
        flags = [flag for flag, other in statuses.items() if other == found]
        for first in range(0, len(flags), _WIDTH):
            yield ", ".join(map(_code, flags[first : first + _WIDTH])), found


def _titled(title: str) -> str:
    return title[:1].upper() + title[1:]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _code(value: object) -> str:
    return f"`{getattr(value, 'name', value)}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


_MEANING = {
    UNSUPPORTED: "**unsupported**: the job is refused at its start, in one line with a fix. A flag that *goes with*"
    " another has an effect with that one only",
    CHANGED: "**works, and changes**: accepted, and something is different while ranks are lost, or for some values",
    WORKS: "**works**: accepted; nothing that a user has to know changes. Not every flag has been run by itself",
}

_HEAD = """# Megatron: every flag

This page tells you what becomes of each flag of Megatron's parser when a job loses ranks. For your own command line,
`ntp check` gives the answer at once: [will my job run?](running.md#will-my-job-run)

`make megatron-flags` writes this page from the parser of megatron-core 0.19.2 and the tables in
[unsupported.py](../ntp_plugin/megatron/unsupported.py) and
[degraded_changes.py](../ntp_plugin/megatron/degraded_changes.py). Do not edit it.

| | flags |
|---|---|
{counts}

Groups of flags that do not touch training, of which only unsupported ones are listed: {others}. The plugin's own flags
are on the pages for [degraded layouts](megatron.md#flags) and [live jobs](megatron-live.md#flags).
"""

_FOOT = """
Next: [what works in a degraded layout](megatron.md#what-works-in-a-degraded-layout), [a rank dies](megatron-live.md).
"""


def main(path: str) -> None:
    """Write the page."""
    Path(path).write_text(page(recipe_check.parser()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
