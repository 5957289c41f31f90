"""Puts the stand-in in the place of TransformerEngine's extension, before TransformerEngine is imported."""

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ntp_plugin.errors import ConfigError
from ntp_plugin.megatron.te_emulation import extension

PACKAGE = "transformer_engine"
FOLDER = Path(sys.prefix) / "transformer-engine"
"""Where the package lies without its compiled parts. Among the other packages it would break every `import megatron`
without the emulation: it raises an error of its own where its libraries are not found."""
_HOW = f"pip install --no-deps --target {FOLDER} transformer-engine onnxscript onnx onnx-ir ml_dtypes"


def is_wanted(words: Sequence[str]) -> bool:
    """Whether Megatron's arguments ask for TransformerEngine, which is its default.

    Args:
        words: The command line of the script; `@FILE` stands for the arguments in a file, as in Megatron.
    """
    words = list(_expanded(words))
    chosen = "transformer_engine" if any(word.startswith("--") for word in words) else "local"
    for at, word in enumerate(words):
        if word == "--transformer-impl" and at + 1 < len(words):
            chosen = words[at + 1]
        elif word.startswith("--transformer-impl="):
            chosen = word.partition("=")[2]
    return chosen != "local"


def _expanded(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        if word.startswith("@") and Path(word[1:]).is_file():
            yield from Path(word[1:]).read_text().split()
        else:
            yield word


def is_installed() -> bool:
    """Whether TransformerEngine's Python package is on this machine."""
    return FOLDER.is_dir() or importlib.util.find_spec(PACKAGE) is not None


def install() -> None:
    """Have TransformerEngine find the stand-in.

    Raises:
        ConfigError: The package is not there.
    """
    if extension.NAME in sys.modules:
        return
    if not is_installed():
        raise ConfigError(
            "NTP_CPU runs --transformer-impl transformer_engine, and the package transformer-engine is not installed",
            fix=f"{_HOW}; or --transformer-impl local",
        )
    if FOLDER.is_dir():
        sys.path.append(str(FOLDER))
    before = os.environ.get("NVTE_PROJECT_BUILDING")
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # else importing the package loads CUDA's libraries
    try:
        from transformer_engine import common  # noqa: PLC0415  (not before the variable is set)
    finally:
        if before is None:
            del os.environ["NVTE_PROJECT_BUILDING"]
        else:
            os.environ["NVTE_PROJECT_BUILDING"] = before
    sys.modules[extension.NAME] = extension.build()
    common.load_framework_extension = _nothing_to_load
    os.environ.setdefault("NVTE_TORCH_COMPILE", "0")


def _nothing_to_load(_: Any) -> None:
    pass
