"""Checks versions and environment variables before the first NCCL group is made.

The process that is about to make the group checks them once. A value that the user set and that cannot work is refused;
a value that nobody set is set here.
"""

import dataclasses
import os
from collections.abc import MutableMapping
from typing import Any

import torch
import torch.distributed as dist

from ntp_plugin.errors import Refused

TORCH = (2, 15)
"""The first version with `ProcessGroup.reconfigure` for NCCL."""
NCCL = (2, 28)
"""The first version with `ncclCommRevoke`; RCCL on AMD GPUs: 2.30.7, see torch's NcclApi.hpp."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NcclVariable:
    """An environment variable, the value to set if it has none, and the values that cannot work."""

    name: str
    value: str | None = None
    instead_of: tuple[str, ...] = ()
    """Values that others set without being asked; they are replaced."""
    refused: tuple[str, ...] = ()
    why: str


SETTINGS = (
    NcclVariable(
        name="TORCH_DIST_USE_NCCL2",
        refused=("0",),
        why="0 makes groups of the older NCCL class, which cannot be edited",
    ),
    NcclVariable(
        name="TORCH_DISTRIBUTED_DEBUG",
        refused=("DETAIL",),
        why="DETAIL wraps every backend in one that cannot be edited",
    ),
    NcclVariable(
        name="TORCH_DISTRIBUTED_USE_TORCHCOMMS",
        refused=("1", "true", "True"),
        why="torchcomms makes groups in another way, which is not observed here",
    ),
    NcclVariable(
        name="TORCH_NCCL_ASYNC_ERROR_HANDLING",
        value="0",
        instead_of=("1",),  # torchrun's agent sets it for all its workers
        refused=("2", "3"),
        why="a group that nobody edits would end the process when a peer is lost; edited ones never do",
    ),
    NcclVariable(
        name="TORCH_FR_DUMP_ON_TIMEOUT",
        value="0",
        why="else the first interrupt writes the flight recorder to disk, and may wait 15 s for it, before it revokes",
    ),
)


def prepare_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the required variables; refuse values of the user's that contradict them."""
    for setting in SETTINGS:
        found = environment.get(setting.name)
        if found is not None and found in setting.refused:
            raise Refused(
                f"live recovery of NCCL groups does not go with {setting.name}={found}: {setting.why}",
                fix=f"unset {setting.name}",
            )
        if setting.value is not None and (found is None or found in setting.instead_of):
            environment[setting.name] = setting.value


def require_versions(torch_version: str, nccl_versions: dict[str, tuple[int, ...]]) -> None:
    """Raise unless torch and NCCL, both as built against and as loaded, can edit a group."""
    if tuple(int(part) for part in torch_version.split("+", maxsplit=1)[0].split(".")[:2]) < TORCH:
        raise Refused(
            f"live recovery of NCCL groups needs torch {_dotted(TORCH)} or newer, and this is torch {torch_version}",
            fix=f"install torch >= {_dotted(TORCH)}, or run without live recovery",
        )
    for which, version in nccl_versions.items():
        if version < NCCL:
            raise Refused(
                f"live recovery of NCCL groups needs NCCL {_dotted(NCCL)} or newer (ncclCommRevoke), "
                f"and {which} is NCCL {_dotted(version)}",
                fix="install a torch that was built with a newer NCCL, or run without live recovery",
            )


def require_nccl() -> None:
    """Check all requirements for this process."""
    if not dist.is_nccl_available():
        raise Refused("this torch was built without NCCL", fix="install torch for CUDA, or use gloo")
    nccl: Any = dist.ProcessGroupNCCL
    require_versions(
        str(torch.__version__),
        {
            "the one that torch was built with": tuple(nccl.get_build_nccl_version()),
            "the one that is loaded": tuple(nccl.get_runtime_nccl_version()),
        },
    )
    prepare_environment()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
