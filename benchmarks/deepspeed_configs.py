"""Count the DeepSpeed configurations of other projects that the plugin accepts: a part of `make show-trainers`.

The paths are checkouts, for example of DeepSpeedExamples, LLaMA-Factory, axolotl and accelerate. The evidence has names
of their files and keys, and no content. A configuration is a JSON file with keys of DeepSpeed at its top, or the
`deepspeed_config` of an Accelerate YAML that names a stage of ZeRO. One that the installed DeepSpeed refuses does not
count; its row says why. All others go through `ntp check` as they are, with the processes that their batches imply.
"""

import collections
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from ntp_plugin.errors import ConfigError
from ntp_plugin.planning.job_check import StartedRanks

KEYS = frozenset({"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "fp16", "bf16"})
"""A JSON file with one of these at its top is a configuration."""
_DEVICES = ("offload_optimizer", "offload_param")
_LONGEST = 120


def configurations(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the configurations below a folder, with the path of each."""
    for path in sorted(folder.rglob("*")):
        if path.suffix not in (".json", ".yaml", ".yml") or not path.is_file():
            continue
        found = _of_json(path) if path.suffix == ".json" else _of_accelerate(path)
        if found is not None:
            yield path, found


def _of_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError:  # a template, or no JSON
        return None
    return content if isinstance(content, dict) and KEYS & content.keys() else None


def _of_accelerate(path: Path) -> dict[str, Any] | None:
    """Return what Accelerate makes of a YAML file's `deepspeed_config`; a file that this names is counted by itself."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except (ValueError, yaml.YAMLError):
        return None
    block = content.get("deepspeed_config") if isinstance(content, dict) else None
    return from_accelerate(block, str(content.get("mixed_precision", "no"))) if isinstance(block, dict) else None


def from_accelerate(block: Mapping[str, Any], precision: str) -> dict[str, Any] | None:
    """Return the configuration that Accelerate makes of such a block; None if it names no stage of ZeRO."""
    if "zero_stage" not in block:
        return None
    offloaded = {name: {"device": block.get(f"{name}_device", "none")} for name in _DEVICES}
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": block.get("gradient_accumulation_steps", "auto"),
        "gradient_clipping": block.get("gradient_clipping", "auto"),
        "zero_optimization": {"stage": block["zero_stage"], **offloaded},
        **({precision: {"enabled": True}} if precision in ("fp16", "bf16") else {}),
    }


def check(config: Mapping[str, Any]) -> tuple[list[str], str]:
    """Return the reasons for which the plugin refuses a configuration, and that for which DeepSpeed does."""
    from ntp_plugin.deepspeed import job_check  # noqa: PLC0415  (imports deepspeed)

    try:
        found = job_check.check_job({**config, "ntp": {"enabled": True}}, StartedRanks(), tp=1, parameters=None)
    except ConfigError as error:
        return ([], error.what) if error.what.startswith(job_check.BY_DEEPSPEED) else ([error.what], "")
    return [option.flag for option in found.unsupported], ""


def rows(folders: list[Path]) -> Iterator[dict[str, Any]]:
    """Yield a row for each configuration."""
    for folder in folders:
        for path, config in configurations(folder):
            refused, by_deepspeed = check(config)
            yield {
                "config": f"{folder.name}/{path.relative_to(folder)}",
                "counts": not by_deepspeed,
                "accepted": not by_deepspeed and not refused,
                "why": by_deepspeed[:_LONGEST] or ", ".join(refused),
            }


def counted(folders: list[Path]) -> dict[str, Any]:
    """Return how many configurations below the folders are accepted, why others are not, and a row for each."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # DeepSpeed logs each configuration that it reads
    found = list(rows(folders))
    logging.disable(logging.NOTSET)
    count = [row for row in found if row["counts"]]
    reasons = collections.Counter(why for row in count for why in row["why"].split(", ") if why)
    return {
        "configs": len(count),
        "configs_accepted": sum(row["accepted"] for row in count),
        "configs_refused_by_deepspeed": len(found) - len(count),
        "refused": dict(reasons.most_common()),
        "refused_by_deepspeed": dict(
            collections.Counter(row["why"] for row in found if not row["counts"]).most_common()
        ),
        "configurations": found,
    }
