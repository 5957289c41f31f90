"""Lets a package export names that it imports only on first use.

`import ntp_plugin` must not import torch: `ntp --help` would take seconds, and settings of a framework that have to
precede the import of torch would come too late.
"""

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any


def lazy_exports(
    package: str, homes: Mapping[str, Collection[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package (PEP 562).

    Args:
        package: The name of the package.
        homes: Module -> the names that the package exports from it.
    """
    home_of = {name: module for module, names in homes.items() for name in names}
    namespace = vars(importlib.import_module(package))

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        namespace[name] = value = getattr(importlib.import_module(home_of[name]), name)
        return value

    def names() -> list[str]:
        return sorted({*namespace, *home_of})

    return get, names
