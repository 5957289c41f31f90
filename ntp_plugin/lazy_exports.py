"""Names that a package offers and imports only when somebody asks for one.

`import ntp_plugin` must not import torch: `ntp --help` would take seconds, and a framework's settings that have to be
made before torch is imported would come too late.
"""

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any


def lazy_exports(
    package: str, homes: Mapping[str, Collection[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and the `__dir__` of a package (PEP 562).

    Args:
        package: The name of the package.
        homes: Module -> the names that the package offers from it.
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
