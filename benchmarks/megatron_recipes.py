"""Run Megatron-LM's own recipes under the plugin, with a loss and a return: what `make show-megatron-recipes` measures.

    MEGATRON_LM=path python -m benchmarks.megatron_recipes          all accepted recipes: some hours
    MEGATRON_LM=path ROWS=name,... python -m benchmarks.megatron_recipes    some of them, by parts of their names
    MEGATRON_LM=path ROWS=finished python -m benchmarks.megatron_recipes    those that have run: none is started

`path` is a checkout of NVIDIA/Megatron-LM near core 0.19. Its recipes are the model_config.yaml files of its functional
tests that train a GPT. A recipe that the plugin does not accept as it is (`ntp_plugin.megatron.check`) is not run, and
is counted by what is in the way.

An accepted recipe is scaled down by one rule, `SCALED` below, and nothing else is changed: width, sequence, batch and
steps become small, the data are mock, and precision is float64. Masks of attention dropout are drawn inside of
TransformerEngine's kernels, so that dropout is 0. Two replicas, or two context groups, run on the CPU emulation. A slot
that is drawn from the recipe's name is killed at a fault point and in a step drawn in the same way, and comes back. The
reference run is the same without the kill.

Each finished recipe is a line in build/show/megatron-recipes.jsonl, and the next call continues after it. Recipes whose
scaled command lines are the same run once; those of more than 8 ranks, of another script, of a data set that cannot be
mock, and those that end themselves by a wrong result on purpose, are not run.
"""

import collections
import hashlib
import math
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from benchmarks import evidence
from ntp_plugin.chaos import weights
from ntp_plugin.chaos.campaign import Campaign, quietly, run_campaign
from ntp_plugin.chaos.recipe import RUN, FaultSpec, JobSpec, RandomSpec, Recipe
from ntp_plugin.chaos.verdict import differences
from ntp_plugin.errors import ConfigError, NtpError
from ntp_plugin.megatron import check
from ntp_plugin.megatron.recipe_file import words_of

PARTS = Path("build/show/megatron-recipes.jsonl")
SCRIPT = "recipes/megatron/pretrain_gpt.py"
KINDS = ("gpt", "gpt-nemo")
BOUND = 1e-12
STEPS = 60
FINISHED = "finished"
MOST_RANKS = 8
"""A job of more ranks takes this machine too long."""
FAULT_POINTS = ("forward", "backward", "reduce", "vote", "apply", "applied")
SCALED: Mapping[str, str | None] = {
    **{"--hidden-size": "64", "--num-attention-heads": "8", "--ffn-hidden-size": "160", "--kv-channels": "8"},
    **{"--num-query-groups": "4", "--seq-length": "16", "--max-position-embeddings": "16"},
    **{"--micro-batch-size": "1", "--global-batch-size": "8", "--train-iters": str(STEPS), "--eval-iters": "0"},
    **{"--attention-dropout": "0", "--adam-eps": "1e-4", "--save-interval": "20", "--log-interval": "1"},
    **{"--tokenizer-type": "NullTokenizer", "--vocab-size": "250", "--mock-data": ""},
    **{"--save": f"{RUN}/checkpoints", "--tensorboard-dir": f"{RUN}/board", "--data-cache-path": f"{RUN}/samples"},
    **dict.fromkeys(
        ("--bf16", "--load", "--use-checkpoint-args", "--data-path", "--vocab-file", "--merge-file", "--exit-interval")
    ),
    **dict.fromkeys(("--train-samples", "--lr-decay-samples", "--lr-warmup-samples")),
}
"""The rule: flag -> its value at this scale; empty: a flag without a value; None: left out."""
_SCHEDULE, _BATCH = "--step-batch-size-schedule", "--global-batch-size"
_GROWS = "0:4 1280:8"
"""A batch of 4 for 20 steps (1280 tokens), then of 8, where a recipe has a schedule."""
_ONLY_WHERE_GIVEN = ("--ffn-hidden-size", "--kv-channels", "--num-query-groups")
_LAYERS = "--num-layers"
_UNEVEN = ("--decoder-first-pipeline-num-layers", "--account-for-embedding-in-pipeline-split")
"""Recipes with one of these keep their number of layers, which these flags divide."""
_NOT_AT_THIS_SCALE = frozenset({"--export-te-mcore-model", "--fim-data", "--error-injection-rate"})
"""Flags of Megatron-LM's script for ModelOpt, of a data set that cannot be mock, and of wrong results on purpose, with
which Megatron ends its own job."""


def recipes(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the flags of each recipe that trains a GPT."""
    for kind in KINDS:
        for file in sorted(path.glob(f"tests/functional_tests/test_cases/{kind}/*/model_config.yaml")):
            flags = (yaml.safe_load(file.read_text()) or {}).get("MODEL_ARGS")
            if isinstance(flags, dict) and {"--train-iters", "--train-samples"} & flags.keys():
                yield file.parent.name, flags


def scaled(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of a recipe at the scale of this machine."""
    found = {name: value for name, value in flags.items() if SCALED.get(name, "") is not None}
    found |= {
        name: value
        for name, value in SCALED.items()
        if value is not None and (name in flags or name not in _ONLY_WHERE_GIVEN)
    }
    if _SCHEDULE in flags:
        del found[_BATCH]
        found[_SCHEDULE] = _GROWS
    if not any(name in flags for name in _UNEVEN):
        stages = _number(flags, "--pipeline-model-parallel-size")
        each = _number(flags, "--num-layers-per-virtual-pipeline-stage", 0)
        chunks = _number(flags, _LAYERS) // (stages * each) if each else 1
        chunks = max(chunks, _number(flags, "--num-virtual-stages-per-pipeline-rank"))
        found[_LAYERS] = max(2, stages * chunks * max(1, each))
    return found


def _number(flags: Mapping[str, Any], name: str, default: int = 1) -> int:
    return int(flags.get(name, default))


def _job(flags: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return how many replicas run, with how many stages of how many slots: two, or two groups that share sequences."""
    return (
        2 * _number(flags, "--context-parallel-size"),
        _number(flags, "--pipeline-model-parallel-size"),
        _number(flags, "--tensor-model-parallel-size"),
    )


def campaign_of(name: str, command: Iterable[str], flags: Mapping[str, Any]) -> Recipe:
    """Return the campaign for a recipe: one loss and one return, drawn from its name."""
    replicas, pp, tp = _job(flags)
    draw = random.Random(hashlib.blake2b(name.encode()).digest())
    slot = f"r{draw.randrange(replicas)}.s{draw.randrange(pp)}.t{draw.randrange(tp)}"
    job = JobSpec(
        run=("--standalone", f"--nproc-per-node={replicas * pp * tp}", SCRIPT, *command, "--ntp-enable"),
        environment=(
            *("NTP_CPU=float64", "OMP_NUM_THREADS=1", "PYTHONWARNINGS=ignore"),
            "NTP_PRELOAD=megatron.training.training",
        ),
        fork=True,
        respawns=1,
        returns=1,
        thresholds="hung_s=60",
        bound=BOUND,
        patience_s=1200.0,
    )
    fault = FaultSpec(what="kill", slot=slot, during=draw.choice(FAULT_POINTS), at_step=draw.randrange(3, 10))
    return Recipe(name=name, job=job, faults=(fault,), random=RandomSpec())


def run(name: str, recipe: Recipe, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Run one recipe, and return its row."""
    folder = Path(tempfile.mkdtemp(prefix="ntp-megatron-"))
    (fault,) = recipe.faults
    row: dict[str, Any] = {"recipe": name, "flags": len(flags), "fault": f"{fault.slot} {fault.during} {fault.at_step}"}
    try:
        campaign = run_campaign(recipe, folder / "campaign", look=quietly)
    except NtpError as error:
        return row | {"holds": False, "why": str(error)[:300], "folder": str(folder)}
    row |= _judged(campaign)
    if row["holds"]:
        shutil.rmtree(folder)
    else:
        row["folder"] = str(folder)
    return row


def _judged(campaign: Campaign) -> dict[str, Any]:
    verdict, reference = campaign.verdict, campaign.reference
    assert reference is not None, "the job has one"
    losses = differences(campaign.broken.history, reference.history)
    (outcome,) = verdict.outcomes
    wrong = [f"{check.what}: {check.found}" for check in verdict.checks if not check.holds]
    return {
        "loss": max(losses.values(), default=None),
        "weights": max(weights.apart(campaign.broken.history, reference.history).values(), default=None),
        "recovered_s": outcome.recovered_s,
        "holds": verdict.holds,
        "why": "; ".join([*wrong, outcome.problem] if outcome.problem else wrong),
    }


def _in_the_way(flags: Mapping[str, Any]) -> list[str]:
    try:
        return [option.flag for option in check([*words_of({"MODEL_ARGS": flags}, "the recipe"), "--ntp-enable"])]
    except ConfigError:
        return ["a value that Megatron-LM's launcher would fill in"]


def main() -> int:
    """Run what has not run yet, and write the evidence."""
    path, only = Path(os.environ.get("MEGATRON_LM", "")), os.environ.get("ROWS", "")
    if not (path / "tests/functional_tests").is_dir():
        sys.stderr.write("MEGATRON_LM must be the path of a checkout of NVIDIA/Megatron-LM\n")
        return 2
    sittings, in_the_way = evidence.Sittings(PARTS), collections.Counter[str]()
    total, accepted, rows, ran = 0, 0, list[dict[str, Any]](), dict[tuple[str, ...], str]()
    not_run = list[str]()
    for name, flags in recipes(path):
        unsupported = _in_the_way(flags)
        in_the_way.update(unsupported)
        total, accepted = total + 1, accepted + (not unsupported)
        command = tuple(words_of({"MODEL_ARGS": scaled(flags)}, name))
        ranks = math.prod(_job(flags))
        done = sittings.find(recipe=name)
        wanted = done is not None if only == FINISHED else not only or any(part in name for part in only.split(","))
        if unsupported or not wanted:
            continue
        if ranks > MOST_RANKS or _NOT_AT_THIS_SCALE & flags.keys() or ran.setdefault(command, name) != name:
            not_run.append(name)
            continue
        row = done
        if row is None:
            row = run(name, campaign_of(name, command, flags), flags)
            sittings.add(row)
        sys.stderr.write(f"{row}\n")
        rows.append(row)
    return evidence.show(
        "megatron-recipes",
        holds=bool(rows) and all(row["holds"] for row in rows),
        seed=0,
        rows=rows,
        recipes=total,
        accepted=accepted,
        ran=len(rows),
        not_run=not_run,
        in_the_way=dict(in_the_way.most_common()),
    )


if __name__ == "__main__":
    sys.exit(main())
