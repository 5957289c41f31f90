"""What the signature of a function is, as text that two versions of a framework can be compared by.

Annotations are left out: they change without any effect. A default counts, because a call that leaves the argument out
rests on it; one that is no number, string or None counts as being there.
"""

import enum
import functools
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

MISSING = "missing"
ANYTHING = "(*args, **kwargs)"
"""What a wrapper has that passes all on, as profilers and tracers put around functions: it hides the signature."""
_PLAIN = (bool, int, float, str, type(None))
_MARKS: Mapping[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def signature_of(target: str) -> str:
    """Return the signature of a target such as `megatron.core.x:Class.__init__`, or `MISSING`.

    A class has its constructor's. Whatever cannot be called is a `property` or a `value`.
    """
    module, _, path = target.partition(":")
    try:
        found = functools.reduce(getattr, path.split(".") if path else (), importlib.import_module(module))
    except (AttributeError, ModuleNotFoundError):
        return MISSING
    return text_of(found)


def text_of(found: Any) -> str:
    """Return the signature of a function or class, or what else it is."""
    if not callable(found):
        return "property" if isinstance(found, property) else "value"
    if isinstance(found, enum.EnumType):  # its constructor is Python's
        return "class"
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):  # written in C
        return "class" if isinstance(found, type) else "function"
    return f"({', '.join(map(_parameter, parameters))})"


def _parameter(parameter: inspect.Parameter) -> str:
    name = _MARKS.get(parameter.kind, "") + parameter.name
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
        name = f"{name} (keyword)"
    if parameter.default is inspect.Parameter.empty:
        return name
    return f"{name}={parameter.default!r}" if isinstance(parameter.default, _PLAIN) else f"{name}=..."
