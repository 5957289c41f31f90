"""Runs a worker's script, with the plugin's hooks in the framework that the script imports.

`ntp run` puts this module before the script of every worker, so that the script needs no change:

    python -m ntp_plugin.launch.script pretrain_gpt.py ARGUMENTS          or   ... -m MODULE ARGUMENTS

It imports no framework itself. The hooks are installed once the script has imported the framework, or never. The
script's arguments (Megatron) or its configuration (DeepSpeed) control what they do. Only the CPU emulation has to be
installed before the framework (`megatron/cpu_emulation.py`). With `ntp run --ntp-deepspeed` DeepSpeed is imported ahead
of the script.
"""

import importlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from ntp_plugin.errors import NtpError
from ntp_plugin.launch import quick_exit
from ntp_plugin.recovery.script_failure import reported

_MEGATRON, _DEEPSPEED = "megatron.training.arguments", "deepspeed"
_ACCELERATE, _TRAINER = "accelerate.state", "transformers.trainer"
_ACCELERATOR = "accelerate.accelerator"
_ADAPTERS = ("ntp_plugin.megatron.activation", "ntp_plugin.deepspeed.activation")


def with_hooks(words: Sequence[str], *, through: Sequence[str] = ()) -> tuple[str, ...]:
    """Insert this module before the script in a worker's command line.

    Args:
        words: The command line behind `python`.
        through: Arguments to insert between this module and the script.
    """
    place = next(number for number, word in enumerate(words) if word == "-m" or not word.startswith("-"))
    if words[place] == "-m" and words[place + 1] in ("ntp_plugin.megatron", __name__):
        return tuple(words)
    return (*words[:place], "-m", __name__, *through, *words[place:])


def after_import(name: str, then: Callable[[], None]) -> None:
    """Call a function once a module is imported: now, if it is already, as with the CPU emulation."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, AfterImport(name, then))


class AfterImport(MetaPathFinder):
    """An import hook that calls a function once, right after the first import of a module.

    Many libraries ask for the spec before, only to know whether the module is installed.
    """

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then, self._asks = name, then, False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002
        """Return the module's own spec, with a loader that calls the function after the import."""
        if name != self._name or self._asks:
            return None
        self._asks = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asks = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self._imported)
        return spec

    def _imported(self) -> None:
        sys.meta_path.remove(self)
        self._then()


class _Then(Loader):
    def __init__(self, loader: Loader, then: Callable[[], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then()

    def __getattr__(self, name: str) -> Any:  # other attributes of a loader, such as `get_source`
        return getattr(self._loader, name)


def main(words: Sequence[str]) -> None:
    """Run the script as Python would; one of our errors ends it with one line and its exit code."""
    try:
        install_cpu_emulation(words)
        after_import(_MEGATRON, _hook_megatron)
        after_import(_DEEPSPEED, _hook_deepspeed)
        after_import(_ACCELERATE, _hook_accelerate)
        if "NTP_DEEPSPEED" in os.environ:  # so that no process group of the script comes before the hooks
            importlib.import_module(_DEEPSPEED)
        try:
            with reported():
                run(words)
        except SystemExit as exit_:
            if exit_.code:
                raise
        _end()
    except NtpError as error:
        print(f"ntp: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


def run(words: Sequence[str]) -> None:
    """Run a script, or `-m` and a module, with its arguments, as Python itself would."""
    if words[0] == "-m":
        sys.argv = list(words[1:])
        sys.modules.pop(words[1], None)  # a warm spare may have imported it, and runpy would warn
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


def install_cpu_emulation(words: Sequence[str]) -> None:
    """Install the CPU emulation if `NTP_CPU` is set. A spare calls it before it imports the framework."""
    if os.environ.get("NTP_CPU"):
        from ntp_plugin.megatron import cpu_emulation  # noqa: PLC0415  (imports torch)

        cpu_emulation.install(cpu_emulation.wanted(), words)


def _hook_megatron() -> None:
    from ntp_plugin.megatron import activation  # noqa: PLC0415  (the framework is imported now)

    activation.install()


def _hook_deepspeed() -> None:
    import ntp_plugin.deepspeed  # noqa: F401, PLC0415  (the import installs the hooks)

    after_import(_TRAINER, _hook_trainer)
    after_import(_ACCELERATOR, _hook_accelerator)


def _hook_trainer() -> None:
    from ntp_plugin.deepspeed import hf  # noqa: PLC0415  (both frameworks are imported now)

    hf.install()


def _hook_accelerator() -> None:
    from ntp_plugin.deepspeed import accelerate_loop  # noqa: PLC0415  (both frameworks are imported now)

    accelerate_loop.install()


def _hook_accelerate() -> None:
    from ntp_plugin.launch import accelerate_on_cpu  # noqa: PLC0415  (imports torch)

    accelerate_on_cpu.install()


def _end() -> None:
    for name in _ADAPTERS:
        if name in sys.modules:
            sys.modules[name].end()


if __name__ == "__main__":
    quick_exit.arm()
    with quick_exit.on_errors_of_ours():
        main(sys.argv[1:])
