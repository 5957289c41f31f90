"""The place of a process in its job, and the job's settings, as `ntp run` passes them in the environment."""

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
from ntp_plugin.planning.expert_groups import require_whole_groups
from ntp_plugin.planning.topology import Topology
from ntp_plugin.telemetry import Began
from ntp_plugin.telemetry.whereabouts import here

_MARKER = "NTP_HEARTBEATS"


def corner(run_id: str) -> str:
    """The prefix of a job's keys in the store, so that several jobs can share one store."""
    return f"ntp/{run_id}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankContext:
    """The place of a process in its job and the job's settings: read once, at start."""

    slot: int
    slots: int
    incarnation: str
    store_host: str
    store_port: int
    corner: str
    token: str
    """The token that signs what the job writes into its store."""
    heartbeats: Path
    heartbeat_s: float
    hung_s: float
    """Seconds after which a member that holds up the others is taken for hung."""
    publish_s: float = 0.0
    """Seconds in which a loss may be unpublished, at least: the loss of a whole host shows only in missed
    heartbeats."""
    per_host: int
    """Processes of the job on each host."""
    copies: Path
    """The folder of this host's copies of training state."""
    resume: Path | None = None
    """The folder of the copies of a dead run, if this run resumes from them."""
    export: Path | None = None
    """The folder to write these copies to as a checkpoint, if the run does only that."""
    events: Path | None = None
    """The folder of the run's record, if it has one."""

    @property
    def member_id(self) -> MemberId:
        return MemberId(slot=self.slot, incarnation=self.incarnation)

    @property
    def first_view(self) -> View:
        """The view of all slots, as the job starts."""
        return first_view(self.slots)

    def secret_for(self, purpose: str) -> str:
        """Derive a secret of the job for one purpose from its token, so that no process has to receive it.

        Args:
            purpose: What the secret is for; another purpose, run or token has another secret.
        """
        message = f"{purpose}\0{self.corner}".encode()
        return hmac.digest(self.token.encode(), message, "sha256").hex()

    def topology(
        self,
        policy: TrainingPolicy,
        *,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        dp_last: bool = False,
        expert_slots: int = 0,
    ) -> Topology:
        """The nominal layout of the job, and its hosts."""
        each = tp * pp * cp
        if self.slots % each:
            what = "replicas" if cp == 1 else f"groups of {cp} replicas, which share each sample:"
            raise Refused(
                f"{self.slots} processes do not make full-width {what} of {each}", fix=f"start a multiple of {each}"
            )
        levels = {"nodes_per_rack": policy.nodes_per_rack, "racks_per_power_row": policy.racks_per_power_row}
        known = {name: value for name, value in levels.items() if value is not None}
        parallel = Parallel(
            tp=tp, pp=pp, cp=cp, dp=self.slots // each, dp_last=dp_last, gpus_per_node=self.per_host, **known
        )
        topology = dataclasses.replace(Topology.of(parallel), expert_slots=expert_slots)
        if expert_slots:
            require_whole_groups(topology)
        return topology

    def beginning(
        self, policy: TrainingPolicy, topology: Topology, *, micro_batches: int, framework: Mapping[str, str]
    ) -> Began:
        """The event that this process records before its first step.

        Args:
            policy: The policy of the training.
            topology: The nominal layout of the job.
            micro_batches: The micro-batches of each replica.
            framework: The framework's version by its name.
        """
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
        """Whether this process takes the place of a lost one."""
        return self.incarnation != founding_incarnation(self.slot)  # read in each step: no view is built

    @staticmethod
    def is_elastic(environment: Mapping[str, str] = os.environ) -> bool:
        """Whether `ntp run` started this process."""
        return _MARKER in environment

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> "RankContext":
        """Read the environment that `ntp run` made."""
        if _MARKER not in environment:
            raise ConfigError("this process was not started by `ntp run`", fix="ntp run takes torchrun's flags")
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
            resume=Path(folder) if (folder := environment.get("NTP_RESUME")) else None,
            export=Path(folder) if (folder := environment.get("NTP_EXPORT")) else None,
            events=Path(folder) if (folder := environment.get("NTP_EVENTS")) else None,
            per_host=int(environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"])),
        )


def founding_incarnation(slot: int, host_incarnation: int = 0) -> str:
    """The incarnation of a slot's first process; a machine that replaces a host starts the host's next incarnation."""
    return f"{slot}/0" + f"@{host_incarnation}" * bool(host_incarnation)


def first_view(slots: int) -> View:
    """The view of all slots, as a job of this size starts."""
    return View(
        epoch=0, member_ids=tuple(MemberId(slot=slot, incarnation=founding_incarnation(slot)) for slot in range(slots))
    )


def _in_words(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The names and values of all settings that are set."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", word) for inner, word in _in_words(value))
        elif value not in (None, ()):
            yield name, str(value)
