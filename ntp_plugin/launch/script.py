"""A worker's script, with the plugin's hooks in the framework that it imports.

`ntp run` puts this module before the script of every worker, so that a recipe needs no line of ours:

    python -m ntp_plugin.launch.script pretrain_gpt.py ARGUMENTS          or   ... -m MODULE ARGUMENTS

Nothing is imported for it. The hooks go in when the script has imported the framework, and not at all where it never
does; what they do is said in the script's arguments (Megatron) or in its configuration (DeepSpeed). Only the rehearsal
on CPU has to be there before the framework (`megatron/cpu_emulation.py`).
"""

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
_ADAPTERS = ("ntp_plugin.megatron.activation", "ntp_plugin.deepspeed.activation")


def with_hooks(words: Sequence[str], *, through: Sequence[str] = ()) -> tuple[str, ...]:
    """A worker's command behind `python`, with this module before its script, and one more between if asked for."""
    place = next(number for number, word in enumerate(words) if word == "-m" or not word.startswith("-"))
    if words[place] == "-m" and words[place + 1] in ("ntp_plugin.megatron", __name__):
        return tuple(words)
    return (*words[:place], "-m", __name__, *through, *words[place:])


def after_import(name: str, then: Callable[[], None]) -> None:
    """Call a function as soon as a module is imported: now, if it is already, as the rehearsal on CPU brings it."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, AfterImport(name, then))


class AfterImport(MetaPathFinder):
    """Calls a function once, right after a module was imported by whoever imports it first.

    Many ask for its spec before, only to know whether it is installed.
    """

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then, self._asks = name, then, False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002
        """Its own spec, with a loader that calls the function in the end."""
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

    def __getattr__(self, name: str) -> Any:  # whatever else is asked of a module's loader: its source, say
        return getattr(self._loader, name)


def main(words: Sequence[str]) -> None:
    """Run the script as Python would; an error of ours ends it with one line and its exit code."""
    try:
        rehearse_on_cpu()
        after_import(_MEGATRON, _hook_megatron)
        after_import(_DEEPSPEED, _hook_deepspeed)
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
    """A script, or `-m` and a module, with what is behind it, as Python itself would."""
    if words[0] == "-m":
        sys.argv = list(words[1:])
        sys.modules.pop(words[1], None)  # a process that was warm has it, and runpy would warn of that
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


def rehearse_on_cpu() -> None:
    """As `NTP_CPU` says; a spare does it before it imports the framework."""
    if os.environ.get("NTP_CPU"):
        from ntp_plugin.megatron import cpu_emulation  # noqa: PLC0415  (it brings torch)

        cpu_emulation.install(cpu_emulation.wanted())


def _hook_megatron() -> None:
    from ntp_plugin.megatron import activation  # noqa: PLC0415  (the framework is there now)

    activation.install()


def _hook_deepspeed() -> None:
    import ntp_plugin.deepspeed  # noqa: F401, PLC0415  (the import puts them in)


def _end() -> None:
    for name in _ADAPTERS:
        if name in sys.modules:
            sys.modules[name].end()


if __name__ == "__main__":
    quick_exit.arm()
    with quick_exit.on_errors_of_ours():
        main(sys.argv[1:])
