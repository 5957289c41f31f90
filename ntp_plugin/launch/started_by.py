"""Writes the command line of a run into the folder of its copies, so that its owner knows where they come from.

The command is shown by `ntp copies export`, and never executed: only what a person types is run.

The file has the command line of the workers, not that of `ntp run`: the interpreter, the script, its arguments, the
number of workers, and the working folder. It does not have the environment, which may hold secrets; the person who
starts the script again has one.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from ntp_plugin.errors import ConfigError
from ntp_plugin.private_folders import NotPrivate, opened

_NAME = "started-by.json"
_READS = os.O_RDONLY | os.O_NOFOLLOW


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StartedBy:
    """A worker's command, the folder that it was started in, and how many workers there were."""

    words: tuple[str, ...]
    folder: Path
    workers: int
    """On each host."""
    hosts: int

    def write(self, run_folder: Path) -> None:
        """Write the file, readable by its owner only: arguments may be confidential."""
        descriptor = os.open(run_folder / _NAME, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(dataclasses.asdict(self) | {"folder": str(self.folder)}, file)

    @classmethod
    def read(cls, run_folder: Path) -> "StartedBy":
        """Read the command line of a run.

        Args:
            run_folder: The folder of the run's copies, which must be this user's alone.

        Raises:
            ConfigError: There is no such file, or it is damaged.
            NotPrivate: The folder does not belong to this user alone.
        """
        try:
            with opened(run_folder) as there, os.fdopen(os.open(_NAME, _READS, dir_fd=there)) as file:
                return cls._checked(json.load(file))
        except NotPrivate:
            raise
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{run_folder} has no record of the command that started its run",
                fix="resume from it with the job's own command: ntp run --ntp-resume",
            ) from error

    @classmethod
    def _checked(cls, recorded: dict[str, Any]) -> "StartedBy":
        words, folder, workers, hosts = recorded["words"], recorded["folder"], recorded["workers"], recorded["hosts"]
        if not all(isinstance(word, str) for word in [*words, folder]):
            raise TypeError("a command must be strings")
        return cls(words=tuple(words), folder=Path(folder), workers=int(workers), hosts=int(hosts))
