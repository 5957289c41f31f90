"""Kill three ranks in training scripts of others, which are not edited: what `make show-scripts` measures.

    python -m benchmarks.others_scripts                     TRL's command line (`trl sft`): some twenty minutes
    SCRIPTS=path python -m benchmarks.others_scripts        also scripts of DeepSpeedExamples, from a checkout
    ROWS=name,... python -m benchmarks.others_scripts       some of the rows, by parts of their names

Each row is a chaos campaign (`ntp_plugin/chaos/`): `ntp run` starts the script with four ranks, three of them are
killed at fault points, and lost ones come back as far as `returns` says. The reference run is the same command without
faults. Losses and weights are those of the record; `lines` are the lines that the script itself has printed about its
training, and must be the reference run's, character by character; only DeepSpeed-Chat's, in halves, may be `printed`
apart.

The model, its tokenizer and the data are made by `small_inputs.py`. Two scripts need something before they start here,
which `_STARTERS` does outside of them. Each finished row is a line in build/show/scripts.jsonl, and the next call
continues after it. The negative controls have a wrong sample, or a wrong learning rate, while ranks are lost.
"""

import ast
import dataclasses
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import evidence, small_inputs
from ntp_plugin.chaos import weights
from ntp_plugin.chaos.campaign import Campaign, quietly, run_campaign
from ntp_plugin.chaos.recipe import RUN, FaultSpec, JobSpec, RandomSpec, Recipe
from ntp_plugin.chaos.verdict import differences
from ntp_plugin.errors import NtpError

PARTS = Path("build/show/scripts.jsonl")
RANKS, STEPS = 4, 48
BOUND = 1e-5
"""Of losses and weights in float32, after 48 steps at Adam's usual eps of 1e-8, which amplifies rounding."""
_IN_HALVES = 2e-2
_NUMBER = r"\d+(?:\.\d+)?(?:e[-+]?\d+)?"
_ENVIRONMENT = (
    *("DS_ACCELERATOR=cpu", "OMP_NUM_THREADS=1", "PYTHONWARNINGS=ignore", "HF_HUB_OFFLINE=1"),
    *("TOKENIZERS_PARALLELISM=false",),
)
KILLS = (("r0.s0.t0", "backward", 5), ("r2.s0.t0", "vote", 9), ("r3.s0.t0", "forward", 13))
"""Slot, fault point and step. The first rank writes the log."""
KILLS_BUT_THE_FIRST = (("r1.s0.t0", "backward", 5), ("r2.s0.t0", "vote", 9), ("r3.s0.t0", "forward", 13))
"""For scripts that print on the process that was rank 0 at the start, and nowhere while that is lost."""
_NO_CHECKSUMS = """
import os, torch, torchvision.datasets.cifar
torch.manual_seed(7)
os.chdir(os.path.dirname(os.path.abspath(__file__)))
torchvision.datasets.cifar.check_integrity = lambda *_: True
"""
_TRANSFORMERS_4 = """
import contextlib, transformers.modeling_utils
transformers.modeling_utils.no_init_weights = contextlib.nullcontext
"""
_STARTERS = {"cifar10": _NO_CHECKSUMS, "deepspeed-chat": _TRANSFORMERS_4}
"""Run before a script: the one for CIFAR-10 seeds nothing, so two runs would begin with other weights, and seeks images
in the working folder, of which torchvision has checksums; transformers 5 has lost a name that DeepSpeed-Chat imports,
and uses in another step alone."""
_SPOILT = {
    "a sample twice": """
from ntp_plugin.deepspeed.hf import batches
draw = batches.BatchBook.samples
batches.BatchBook.samples = lambda book, epoch, rank, index: draw(book, epoch, rank, index)[:1] * 2
""",
    "a learning rate not restored": """
from ntp_plugin.deepspeed.hf import trainer_loop
def late(loop, step):
    for group in loop.trainer.deepspeed.basic_optimizer.param_groups:
        group["lr"] *= 0.9 if loop.window.degraded else 1.0
trainer_loop.TrainerLoop._set_groups = late
""",
}
"""Negative controls: what is run once the script has imported TRL's trainer."""
_SPOILING = """
import runpy
from ntp_plugin.launch.script import after_import
after_import("trl.trainer.sft_trainer", lambda: exec({code!r}, {{}}))
runpy.run_module("trl.scripts.sft", run_name="__main__", alter_sys=True)
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One row: a script with its arguments."""

    script: str
    stage: int
    words: tuple[str, ...]
    lines: Callable[[str], list[str]]
    """What is compared of a log."""
    lora: bool = False
    preload: str = "deepspeed,transformers.trainer"
    returns: int = 1
    bound: float = BOUND
    printed: float = 0.0
    """Relative difference that printed numbers may have; 0: none."""
    kills: tuple[tuple[str, str, int], ...] = KILLS
    slowed_by_s: float = 0.05
    """Added to each forward of the rank that is never killed, so that a lost one has time to come back."""
    environment: tuple[str, ...] = ()
    spares: int = 0
    """Warm spares that come back; without any, lost ranks come back in forks."""

    @property
    def name(self) -> str:
        return f"{self.script}{' lora' if self.lora else ''} zero-{self.stage}{' spares' if self.spares else ''}"


# ---------------------------------------------------------------- the lines of a log

_ESTIMATES = ("entropy", "mean_token_accuracy")
"""Metrics that TRL gathers in each loss: while ranks are lost they are of one rank (docs/deepspeed.md)."""


def trainer_lines(log: str) -> list[str]:
    """Return the lines of transformers' Trainer, but for times and estimates."""
    lines = (ast.literal_eval(words) for words in re.findall(r"\{'[a-z_]+': [^{}]*\}", log))
    return [
        str({name: value for name, value in line.items() if name not in _ESTIMATES})
        for line in lines
        if "learning_rate" in line
    ]


def chat_lines(log: str) -> list[str]:
    """Return the last perplexity of DeepSpeed-Chat: those before may lack the samples of lost ranks."""
    return re.findall(r"ppl: [\d.]+, loss: [\d.]+", log)[-1:]


def cifar_lines(log: str) -> list[str]:
    """Return the accuracies at the end of the CIFAR-10 script."""
    return re.findall(r"Accuracy of .*%", log)


# ---------------------------------------------------------------- the scripts


def cases(inputs: Path) -> Iterator[Case]:
    """Yield all rows whose scripts there are."""
    for stage in (2, 3):
        for lora in (False, True):
            yield sft(inputs, stage, lora=lora)
    yield dataclasses.replace(sft(inputs, 3, lora=False), spares=1)
    if path := os.environ.get("SCRIPTS"):
        for stage in (2, 3):
            yield cifar(inputs, Path(path), stage)
            yield chat(inputs, Path(path), stage)


def sft(inputs: Path, stage: int, *, lora: bool) -> Case:
    """Return TRL's supervised fine-tuning, as `trl sft` runs it."""
    words = (
        *("-m", "trl.scripts.sft", f"--model_name_or_path={inputs}/model", f"--dataset_name={inputs}/text"),
        *("--dtype=float32", "--max_length=32", *_of_trainer(inputs, stage)),
        *(("--use_peft", "--lora_target_modules=all-linear", "--lora_dropout=0") if lora else ()),
    )
    preload = "deepspeed,transformers.trainer,trl.trainer.sft_trainer"
    return Case(script="trl sft", stage=stage, lora=lora, words=words, preload=preload, lines=trainer_lines)


def _of_trainer(inputs: Path, stage: int) -> tuple[str, ...]:
    config = inputs / f"zero-{stage}.json"
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    block = {"ntp": {"enabled": True}, "zero_optimization": {"stage": stage}, **dict.fromkeys(auto, "auto")}
    config.write_text(json.dumps(block))
    return (
        *(f"--max_steps={STEPS}", "--logging_steps=1", "--learning_rate=1e-3", "--bf16=False", "--seed=7"),
        *("--per_device_train_batch_size=2", "--gradient_accumulation_steps=2", "--report_to=none"),
        *("--save_strategy=no", f"--output_dir={RUN}/out", f"--deepspeed={config}"),
    )


def cifar(inputs: Path, checkout: Path, stage: int) -> Case:
    """Return DeepSpeedExamples' CIFAR-10: 40 steps in a data epoch; it looks for `data` in the working folder."""
    words = (
        *("--ntp-deepspeed=on", str(inputs / "cifar10.py"), str(checkout / "training/cifar/cifar10_deepspeed.py")),
        *("--epochs=2", "--dtype=fp32", f"--stage={stage}"),
    )
    return Case(
        script="cifar10",
        stage=stage,
        words=words,
        preload="deepspeed,torchvision",
        lines=cifar_lines,
        kills=KILLS_BUT_THE_FIRST,
        slowed_by_s=0.3,
    )


def chat(inputs: Path, checkout: Path, stage: int) -> Case:
    """Return the first step of DeepSpeed-Chat, in bf16: it knows halves only, which round by the order of a sum. All
    ranks come back, since its evaluation leaves out the samples of lost ones."""
    folder = checkout / "applications/DeepSpeed-Chat"
    words = (
        *("--ntp-deepspeed=on", str(inputs / "deepspeed-chat.py")),
        *(str(folder / "training/step1_supervised_finetuning/main.py"), "--local_rank=${local_rank}"),
        *("--data_path=local/jsonfile", "--data_split=10,0,0", f"--data_output_path={inputs}/chat-cache"),
        *(f"--model_name_or_path={inputs}/model", "--per_device_train_batch_size=2", "--max_seq_len=32"),
        *("--gradient_accumulation_steps=2", "--num_train_epochs=3", "--dtype=bf16", f"--zero_stage={stage}"),
    )
    return Case(
        script="deepspeed-chat",
        stage=stage,
        words=words,
        lines=chat_lines,
        returns=3,
        bound=_IN_HALVES,
        printed=_IN_HALVES,
        kills=KILLS_BUT_THE_FIRST,
        slowed_by_s=0.2,
        environment=(f"PYTHONPATH={Path.cwd()}:{_beside_data(inputs / 'chat', folder / 'dschat')}",),
    )


def _beside_data(folder: Path, package: Path) -> Path:
    """Make a folder with a link to DeepSpeed-Chat's package, which looks for its data beside itself."""
    if not folder.exists():
        small_inputs.make_chats(folder, train=480, test=16)
        (folder / "dschat").symlink_to(package.resolve())
    return folder


def make_inputs(folder: Path) -> None:
    """Write the model, the data, and what starts two of the scripts."""
    small_inputs.make_model(folder / "model")
    small_inputs.make_texts(folder / "text", train=240, test=40)
    small_inputs.make_cifar(folder / "data/cifar-10-batches-py", train=640, test=64)
    end = "import runpy, sys\nsys.argv = sys.argv[1:]\nsys.path[0] = sys.argv[0].rpartition('/')[0]\n"
    end += "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    for script, before in _STARTERS.items():
        (folder / f"{script}.py").write_text(before + end)


# ---------------------------------------------------------------- runs


def campaign_of(case: Case, inputs: Path) -> Recipe:
    """Return the campaign of a row."""
    back: dict[str, Any] = {"spares": case.spares} if case.spares else {"fork": True}
    job = JobSpec(
        run=("--standalone", f"--nproc-per-node={RANKS}", *case.words),
        environment=(
            *(*_ENVIRONMENT, f"HF_DATASETS_CACHE={inputs}/cache", f"NTP_PRELOAD={case.preload}"),
            *case.environment,
        ),
        respawns=case.returns,
        returns=case.returns,
        thresholds="hung_s=90,silent_s=60",
        bound=case.bound,
        patience_s=900.0,
        **back,
    )
    killed = {slot for slot, _, _ in case.kills}
    (left,) = (slot for slot in (f"r{rank}.s0.t0" for rank in range(RANKS)) if slot not in killed)
    slow = FaultSpec(what="slow", slot=left, during="forward", at_step=2, seconds=case.slowed_by_s)
    kills = (FaultSpec(what="kill", slot=slot, during=during, at_step=step) for slot, during, step in case.kills)
    return Recipe(name="scripts", job=job, faults=(slow, *kills), random=RandomSpec())


def row_of(case: Case, folder: Path, inputs: Path) -> dict[str, Any]:
    """Run a case and return its row."""
    row: dict[str, Any] = {"script": case.script, "stage": case.stage, "lora": case.lora, "name": case.name}
    try:
        campaign = run_campaign(campaign_of(case, inputs), folder, look=quietly)
    except NtpError as error:
        return row | {"holds": False, "why": str(error)[:300], "folder": str(folder)}
    row |= judged(case, campaign)
    return row if row["holds"] else row | {"folder": str(folder)}


def judged(case: Case, campaign: Campaign) -> dict[str, Any]:
    """Return what a campaign has found."""
    verdict, broken, reference = campaign.verdict, campaign.broken, campaign.reference
    assert reference is not None, "the job has one"
    mine, theirs = (case.lines(run.log.read_text(errors="replace")) for run in (broken, reference))
    kills = [outcome for outcome in verdict.outcomes if outcome.what == "kill"]
    back = {slot for slots in broken.history.recoveries.values() for one in slots.values() for slot in one.event.back}
    wrong = [f"{check.what}: {check.found}" for check in verdict.checks if not check.holds]
    wrong += [f"{outcome.name}: {outcome.problem}" for outcome in verdict.outcomes if outcome.problem]
    distances = [distance(line, other) for line, other in zip(mine, theirs, strict=False)]
    alike = len(mine) == len(theirs) > 0 and max(distances) <= case.printed
    return {
        "kills": sum(outcome.injected_at > 0 for outcome in kills),
        "returned": len(back),
        "log_lines": len(theirs),
        "lines_equal": distances.count(0.0),
        "lines_apart": max(distances, default=None),
        "lines_bound": case.printed,
        "loss": max(differences(broken.history, reference.history).values(), default=None),
        "weights": max(weights.apart(broken.history, reference.history).values(), default=None),
        "recovered_s": max((one.recovered_s for one in kills if one.recovered_s is not None), default=None),
        "bound": case.bound,
        "holds": alike and not wrong,
        "why": "; ".join(wrong if alike else [*wrong, "the printed lines differ"]),
    }


def distance(line: str, other: str) -> float:
    """Return the largest relative difference of the numbers in two lines: 0 if these are the same, character by
    character, and infinite if anything but numbers differs."""
    if line == other:
        return 0.0
    mine, theirs = (re.findall(_NUMBER, text) for text in (line, other))
    if re.sub(_NUMBER, "", line) != re.sub(_NUMBER, "", other):
        return math.inf
    pairs = [(float(one), float(two)) for one, two in zip(mine, theirs, strict=True)]
    return max(abs(one - two) / max(abs(two), 1e-300) for one, two in pairs)


def noticed(control: str, inputs: Path, folder: Path) -> bool:
    """Return whether a planted fault is found, by the printed lines or by the record."""
    starter = inputs / f"{folder.name}.py"
    starter.write_text(_SPOILING.format(code=_SPOILT[control]))
    case = sft(inputs, 2, lora=False)
    spoilt = dataclasses.replace(case, words=(str(starter), *case.words[2:]))
    row = row_of(spoilt, folder, inputs)
    print(row, file=sys.stderr, flush=True)
    return row.get("kills") == len(KILLS) and row["lines_equal"] < row["log_lines"]


def main() -> int:
    """Run what has not run yet, and write the evidence."""
    only = [part for part in os.environ.get("ROWS", "").split(",") if part]
    folder = Path(tempfile.mkdtemp(prefix="ntp-scripts-"))
    sittings, rows = evidence.Sittings(PARTS), list[dict[str, Any]]()
    controls = list[dict[str, Any]]()
    make_inputs(inputs := folder / "inputs")
    for case in cases(inputs):
        if only and not any(part in case.name for part in only):
            continue
        row = sittings.find(name=case.name)
        if row is None:
            row = row_of(case, folder / case.name.replace(" ", "-"), inputs)
            sittings.add(row)
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    for control in () if only else _SPOILT:
        row = sittings.find(control=control)
        if row is None:
            row = {"control": control, "noticed": noticed(control, inputs, folder / control.replace(" ", "-"))}
            sittings.add(row)
        controls.append({"name": control, "noticed": row["noticed"]})
    holds = bool(rows) and all(row["holds"] for row in rows) and all(one["noticed"] for one in controls)
    return evidence.show("scripts", holds=holds, seed=7, rows=rows, negative_controls=controls)


if __name__ == "__main__":
    sys.exit(main())
