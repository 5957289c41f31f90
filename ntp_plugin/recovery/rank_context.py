"""Where a process stands in its job, as `ntp run` tells it through its environment."""

import dataclasses
import hmac
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import ntp_plugin
from ntp_plugin.config.sections import Parallel, TrainingPolicy
from ntp_plugin.errors import ConfigError, Refused
from ntp_plugin.membership.protocol import MemberId, View
from ntp_plugin.planning.topology import Topology
from ntp_plugin.telemetry import Began
from ntp_plugin.telemetry.whereabouts import here

_TOLD_BY = "NTP_HEARTBEATS"


def corner(run_id: str) -> str:
    """The corner of the store that belongs to a job, so that several jobs can share one."""
    return f"ntp/{run_id}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankContext:
    """Where a process stands in its job: read once, at start."""

    slot: int
    slots: int
    incarnation: str
    store_host: str
    store_port: int
    corner: str
    token: str
    """That what the job writes into its store is signed with."""
    heartbeats: Path
    heartbeat_s: float
    hung_s: float
    """For so long who holds the others up may do so."""
    publish_s: float = 0.0
    """For so long at least a loss may be unpublished: that of a whole host is noticed when its beats are missed."""
    per_host: int
    """Processes of the job on each host."""
    copies: Path
    """Where copies of training state are kept on this host."""
    resume: Path | None = None
    """Where a run that is dead kept its copies, if this one begins from these."""
    export: Path | None = None
    """Where these are to be written as a checkpoint, if that is all that this run is for."""
    events: Path | None = None
    """Where the run keeps its record, if it has one."""

    @property
    def member_id(self) -> MemberId:
        return MemberId(slot=self.slot, incarnation=self.incarnation)

    @property
    def first_view(self) -> View:
        """Everybody, as the job was started."""
        return first_view(self.slots)

    def secret_for(self, purpose: str) -> str:
        """A secret of the job's, for one purpose: it follows from the token, so no process has to be told it.

        Args:
            purpose: What it is for; another purpose, another run, or another token has another secret.
        """
        of = f"{purpose}\0{self.corner}".encode()
        return hmac.digest(self.token.encode(), of, "sha256").hex()

    def topology(self, policy: TrainingPolicy, *, tp: int = 1, pp: int = 1) -> Topology:
        """The nominal layout of the job, and on how many hosts it stands."""
        if self.slots % (tp * pp):
            raise Refused(
                f"{self.slots} processes do not make whole replicas of {tp * pp}",
                way_out=f"start a multiple of {tp * pp}",
            )
        said = {"nodes_per_rack": policy.nodes_per_rack, "racks_per_power_row": policy.racks_per_power_row}
        told = {name: value for name, value in said.items() if value is not None}
        return Topology.of(Parallel(tp=tp, pp=pp, dp=self.slots // (tp * pp), gpus_per_node=self.per_host, **told))

    def beginning(
        self, policy: TrainingPolicy, topology: Topology, *, micro_batches: int, framework: Mapping[str, str]
    ) -> Began:
        """What this process tells before its first step; `micro_batches` of each replica, and the framework's version
        by its name."""
        ours = {"ntp-plugin": ntp_plugin.__version__, "torch": torch.__version__}
        return Began(
            pid=os.getpid(),
            machine=here(),
            number=self.slot,
            joiner=self.joining,
            replicas=topology.dp,
            stages=topology.pp,
            tp=topology.tp,
            micro_batches=[micro_batches] * topology.dp,
            settings=dict(_in_words(dataclasses.asdict(policy))),
            versions={**ours, **framework},
        )

    @property
    def joining(self) -> bool:
        """Whether this process takes the place of one that was lost."""
        return self.incarnation != founding_incarnation(self.slot)  # asked in each step: not of a view of all slots

    @staticmethod
    def is_told(environment: Mapping[str, str] = os.environ) -> bool:
        """Whether `ntp run` started this process."""
        return _TOLD_BY in environment

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> "RankContext":
        """From the environment that `ntp run` made."""
        if _TOLD_BY not in environment:
            raise ConfigError("this process was not started by `ntp run`", way_out="ntp run takes torchrun's flags")
        host_incarnation = int(environment.get("NTP_HOST_INCARNATION", "0"))
        return cls(
            slot=int(environment["RANK"]),
            slots=int(environment["WORLD_SIZE"]),
            incarnation=environment.get("NTP_INCARNATION")
            or founding_incarnation(int(environment["RANK"]), host_incarnation),
            store_host=environment["MASTER_ADDR"],
            store_port=int(environment["MASTER_PORT"]),
            corner=corner(environment["TORCHELASTIC_RUN_ID"]),
            token=environment["NTP_TOKEN"],
            heartbeats=Path(environment["NTP_HEARTBEATS"]),
            heartbeat_s=float(environment["NTP_HEARTBEAT_S"]),
            hung_s=float(environment["NTP_HUNG_S"]),
            publish_s=float(environment.get("NTP_PUBLISH_S", "0")),
            copies=Path(environment.get("NTP_COPIES") or Path(environment["NTP_HEARTBEATS"]).parent / "copies"),
            resume=Path(told) if (told := environment.get("NTP_RESUME")) else None,
            export=Path(told) if (told := environment.get("NTP_EXPORT")) else None,
            events=Path(told) if (told := environment.get("NTP_EVENTS")) else None,
            per_host=int(environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"])),
        )


def founding_incarnation(slot: int, host_incarnation: int = 0) -> str:
    """The process that has a slot from its host's start; a machine that takes a host's place is the next
    incarnation."""
    return f"{slot}/0" + f"@{host_incarnation}" * bool(host_incarnation)


def first_view(slots: int) -> View:
    """Everybody, as a job of so many slots is started."""
    return View(
        epoch=0, member_ids=tuple(MemberId(slot=slot, incarnation=founding_incarnation(slot)) for slot in range(slots))
    )


def _in_words(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """All that have a value."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", word) for inner, word in _in_words(value))
        elif value not in (None, ()):
            yield name, str(value)
