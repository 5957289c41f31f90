"""This process in a job that `ntp run` started: from its process group to its end."""

import contextlib
import functools
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size

from ntp_plugin.config.sections import TrainingPolicy
from ntp_plugin.deepspeed import fingerprints
from ntp_plugin.deepspeed.accumulation_window import AccumulationWindow
from ntp_plugin.deepspeed.loaders import Loaders
from ntp_plugin.deepspeed.trainer import EngineTrainer
from ntp_plugin.deepspeed.unsupported import refuse_configuration, refuse_engine
from ntp_plugin.errors import Refused
from ntp_plugin.patching import Replacement, apply_all
from ntp_plugin.planning.topology import Topology
from ntp_plugin.recovery import exporting, same_settings
from ntp_plugin.recovery.driver import Driver
from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.recovery.fingerprint import Fingerprint
from ntp_plugin.recovery.joining import Alone
from ntp_plugin.recovery.rank_context import RankContext
from ntp_plugin.recovery.replica_comparison import ReplicaWatch
from ntp_plugin.recovery.voted_sections import Loop
from ntp_plugin.telemetry import Ended, EventWriter

_MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")
_SEED = "the seed of masks that do not depend on the rank"


class UnchangedLoop:
    """A snapshot of nothing: a checkpoint changes nothing that would have to be restored."""

    def restore(self) -> None:
        """Restore nothing."""


class UserLoop:
    """The user's loop; a section cannot see its state."""

    def recall(self) -> UnchangedLoop:
        """Return an empty snapshot."""
        return UnchangedLoop()

    def begin_work(self) -> None:
        """Do nothing."""


class DeepSpeedJob:
    """The one job of this process."""

    now: "DeepSpeedJob | None" = None

    def __init__(self, backend: str, timeout: timedelta) -> None:
        """Make the process group, so that it can be edited, and watch it at once: until the first forward there is no
        way to go on after a loss, and whoever waits for the lost rank gets an error."""
        self.rank = ElasticRank(RankContext.read(), backend=backend, timeout=timeout)
        self.trainer = EngineTrainer(self.rank)
        self.loop = Loop(self.rank.groups, UserLoop(), joiner=self.rank.place.joining)
        self.event_writer: EventWriter | None = None
        self.engine: Any = None
        self._alone = Alone()
        if self.rank.place.joining:
            apply_all((*self._alone.table(), *self._gathers_alone()))
        else:
            self.loop.driver = self.rank.drive(self.trainer)
            self.rank.watch()

    def _gathers_alone(self) -> tuple[Replacement, ...]:
        """Return replacements for the gathers of ZeRO-3, which are of parts of tensors that other ranks hold."""

        def alone(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def gather(*args: Any, **kwargs: Any) -> Any:
                everybody = range(self.rank.place.slots)
                with contextlib.nullcontext() if self._alone.over else self.rank.groups.alone(everybody):
                    return original(*args, **kwargs)

            return gather

        why = "there is nobody to gather from before this process is admitted; its weights come later"
        return (
            Replacement(target="deepspeed.comm.torch:TorchBackend.all_gather_into_tensor", why=why, make=alone),
            Replacement(target="deepspeed.comm.torch:TorchBackend.all_gather", why=why, make=alone),
        )

    def refuse(self, engine: Any, config: Any, policy: TrainingPolicy, model: Any, mpu: Any) -> None:
        """Raise `Refused` for an engine that could not go on after a loss, before it is built."""
        if self.engine is not None:
            raise Refused("a second engine is made in this process", fix="switch ntp on for one of them")
        refuse_configuration(engine, config, policy, model=model, mpu=mpu)
        if self.rank.place.export is not None:  # an export trains nothing, and the monitors belong to the job
            for monitor in _MONITORS:
                getattr(config.monitor_config, monitor).enabled = False

    def take(self, engine: Any, policy: TrainingPolicy) -> None:
        """Take the engine, once it is built."""
        refuse_engine(engine)
        place = self.rank.place
        tp = engine.autotp_size() if engine.autotp_size() > 1 else bwc_tensor_model_parallel_world_size(engine.mpu)
        topology = place.topology(policy, tp=tp)
        self._require_same_settings(engine, policy, topology)
        # The events of an export are not part of a run's record.
        record = policy.events or (place.events if place.export is None else None)
        self._policy = policy
        self.engine, self.event_writer = engine, EventWriter(record, str(topology.slot_of(place.slot)))
        self.window = AccumulationWindow(
            engine,
            policy,
            topology,
            rank=self.rank,
            loop=self.loop,
            event_writer=self.event_writer,
        )
        self.trainer.take(
            engine, policy, window=self.window, loop=self.loop, event_writer=self.event_writer, topology=topology
        )
        self.window.watch = ReplicaWatch(
            policy,
            topology,
            rank=self.rank,
            replicated_state=self.trainer.replicated_state,
            distrust=self.trainer.distrust,
            event_writer=self.event_writer,
        )
        # Not before: what is refused above must be refused before the first collective.
        self.window.seed = self._share_seed()
        self.window.into(engine)
        self.window.wait_for_admission, self.window.begin_job = self._wait_for_admission, self._begin
        if place.resume is not None and not place.joining:
            self.trainer.resume(place.resume)
        if place.export is not None:
            self._export(place.export)

    def _export(self, folder: Path) -> NoReturn:
        """Write the export, which is all that this process is for; the rest of the user's script is about training."""
        assert self.event_writer is not None and self.loop.driver is not None, "there is an engine, and nobody joins"
        engine = self.engine
        save = functools.partial(type(engine).save_checkpoint, engine, str(folder))  # not ours: no section
        exporting.write(save, self.loop.driver, folder, step=engine.global_steps, event_writer=self.event_writer)
        self.rank.beat()
        self._end_together(self.loop.driver, self.event_writer)
        sys.exit(0)

    def _require_same_settings(self, engine: Any, policy: TrainingPolicy, topology: Topology) -> None:
        slot = topology.slot_of(self.rank.place.slot)
        settings = fingerprints.settings(engine._config._param_dict, policy)
        whole = Fingerprint(sections={**settings.sections, **fingerprints.model(engine, slot)})
        same_settings.require_same(self.rank, whole, leaves=slot.replica == 0)
        self.rank.share_settings(settings.digest)

    def _share_seed(self) -> int:
        """Return the first rank's own seed, for masks that do not depend on the rank."""
        if self.rank.place.joining:
            known: int = self.rank.shared_value(_SEED)
            return known
        seed = [torch.initial_seed()]
        dist.broadcast_object_list(seed, src=0)
        if not self.rank.place.slot:
            self.rank.share_with_joiners(_SEED, seed[0])
        return seed[0]

    def _wait_for_admission(self) -> None:
        """Start the heartbeat, compare the data sets, and wait for admission on a joining rank. The heartbeat is first,
        because reading samples may take long; all ranks start it here."""
        slot = self.trainer.topology.slot_of(self.rank.place.slot)
        data = fingerprints.data(None if Loaders.last is None else Loaders.last.sampler)
        self.rank.beat()
        same_settings.require_same(self.rank, data, leaves=slot.replica == 0)
        if self.rank.place.joining:
            self.rank.wait_for_admission(self.trainer.together())

    def _begin(self) -> None:
        """Begin the job at the first forward; from here on it survives losses, and a joining rank takes part."""
        assert self.event_writer is not None, "there is an engine"
        place, topology = self.rank.place, self.trainer.topology
        each = self.engine.gradient_accumulation_steps()
        if place.joining:
            self.loop.driver = self.rank.drive(self.trainer)
            self._alone.over = True
            self.rank.watch()
        framework = {"deepspeed": deepspeed.__version__}
        self.event_writer.write(place.beginning(self._policy, topology, micro_batches=each, framework=framework))

    def end(self) -> None:
        """End together with all other ranks; without an engine this process was never part of a training job."""
        if self.event_writer is None:
            self.let_go()
            return
        self.window.end()
        assert self.loop.driver is not None, "it has begun"
        self.loop.driver.at_the_end(self.window.compare)
        self._end_together(self.loop.driver, self.event_writer)

    def _end_together(self, driver: Driver, event_writer: EventWriter) -> None:
        driver.finish()
        if self.trainer.copies is not None:
            self.trainer.copies.close()
        event_writer.write(Ended())
        event_writer.close()
        self.let_go()

    def let_go_of_the_group(self) -> None:
        """Release the process group, because the configuration does not enable the plugin."""
        if self.rank.place.joining:
            raise Refused(
                "this process replaces a lost one, and the configuration does not enable ntp",
                fix='"ntp": {"enabled": true} in it, or leave --ntp-respawn out',
            )
        if self.rank.place.export is not None:
            raise Refused(
                "this process writes the copies of a run as a checkpoint, and the configuration does not enable ntp",
                fix="the configuration of that run, or its --ntp-deepspeed",
            )
        self.let_go()

    def let_go(self) -> None:
        """Restore torch to what it was."""
        self.rank.leave()
        DeepSpeedJob.now = None
