"""Builds `ntp_plugin/copies/machine.c`, where there is a C compiler; without it NumPy and torch do the same.

The compiler is what CC names, or else `cc`. It is called by hand, since that is one call, and no Python is in it.
"""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE, LIBRARY = "ntp_plugin/copies/machine.c", "ntp_plugin/copies/_machine.so"


class Build(BuildHookInterface[Any]):
    """For a wheel, and for an editable installation."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        compiler = shutil.which(os.environ.get("CC", "cc"))
        if compiler is None:
            self.app.display_warning(f"no C compiler was found: {SOURCE} is not built, and digests take longer")
            return
        library = Path(self.root) / LIBRARY
        built = library.with_suffix(".new")
        call = [compiler, "-O3", "-shared", "-fPIC", "-o", str(built), str(Path(self.root) / SOURCE)]
        if subprocess.run(call, check=False).returncode:
            self.app.display_warning(f"{SOURCE} is not built, and digests take longer: {' '.join(call)} failed")
            return
        built.replace(library)  # a process that has the old one goes on with it
        build_data["artifacts"].append(LIBRARY)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
