"""The command that started a run, in the folder of its copies, so that somebody else can make sense of these.

What is written is what the agent starts its workers by, not what was typed to it: the interpreter, the script, its
arguments, how many, and where. The environment is not: it may hold secrets, and who starts the script again has one.
"""

import dataclasses
import json
import os
from pathlib import Path

from ntp_plugin.errors import ConfigError

_NAME = "started-by.json"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StartedBy:
    """A worker's command, the folder that it is started in, and how many of them there were."""

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
        """As it was written."""
        try:
            told = json.loads((run_folder / _NAME).read_text())
            return cls(**told | {"words": tuple(told["words"]), "folder": Path(told["folder"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{run_folder} does not say by which command its run was started",
                way_out="begin from it with the job's own command: ntp run --ntp-resume",
            ) from error
