"""The command that started a run, in the folder of its copies, so that its owner can make sense of these.

It is shown, and never executed: what runs is what a person types. `ntp copies export` without a command shows this one.

What is written is what the agent starts its workers by, not what was typed to it: the interpreter, the script, its
arguments, how many, and where. The environment is not: it may hold secrets, and who starts the script again has one.
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
        """For its owner only: arguments may be nobody else's business."""
        descriptor = os.open(run_folder / _NAME, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(dataclasses.asdict(self) | {"folder": str(self.folder)}, file)

    @classmethod
    def read(cls, run_folder: Path) -> "StartedBy":
        """Read the record of a run.

        Args:
            run_folder: The folder of the run's copies, which must be this user's alone.

        Raises:
            ConfigError: There is no record, or it is none.
            NotPrivate: The folder is not this user's alone.
        """
        try:
            with opened(run_folder) as there, os.fdopen(os.open(_NAME, _READS, dir_fd=there)) as file:
                return cls._checked(json.load(file))
        except NotPrivate:
            raise
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{run_folder} does not say by which command its run was started",
                way_out="begin from it with the job's own command: ntp run --ntp-resume",
            ) from error

    @classmethod
    def _checked(cls, told: dict[str, Any]) -> "StartedBy":
        words, folder, workers, hosts = told["words"], told["folder"], told["workers"], told["hosts"]
        if not all(isinstance(word, str) for word in [*words, folder]):
            raise TypeError("a command is words")
        return cls(words=tuple(words), folder=Path(folder), workers=int(workers), hosts=int(hosts))
