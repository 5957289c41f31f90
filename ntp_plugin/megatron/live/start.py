"""Builds the live job when Megatron has parsed its arguments, and ends it; for jobs of `ntp run` with `--ntp-enable`.

It opens connections and makes the world before Megatron would; Megatron finds the world made. The rank watches for
losses at once: until the first section there is no way to go on after one, and whoever waits for the lost rank gets an
error. Heartbeats start with the first section, because what comes before may take long.
"""

import contextlib
import functools
import logging
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import megatron.core
import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches, update_num_microbatches

from ntp_plugin.config.sections import TrainingPolicy
from ntp_plugin.megatron.hooks import nominal_firsts, of_latent_attention, of_masks
from ntp_plugin.megatron.job_shape import expert_slots
from ntp_plugin.megatron.layers.dropout import ExactDropout
from ntp_plugin.megatron.live import export, fingerprints, hooks
from ntp_plugin.megatron.live.failed_save import require_saved
from ntp_plugin.megatron.live.model_rebuild import ModelRebuild
from ntp_plugin.megatron.live.prediction_log import PredictionLog
from ntp_plugin.megatron.live.samples import SampleHooks
from ntp_plugin.megatron.live.scales import JobScales
from ntp_plugin.megatron.live.step_replay import LoopState
from ntp_plugin.megatron.live.trainer import MegatronTrainer
from ntp_plugin.megatron.live.training_step import TrainingStep
from ntp_plugin.megatron.live.unfinished_save import UnfinishedSave
from ntp_plugin.megatron.option_checks import draws_exact_masks
from ntp_plugin.megatron.reduction.lane_sync import named
from ntp_plugin.patching import apply_all
from ntp_plugin.planning.topology import Topology
from ntp_plugin.recovery import exporting, same_settings
from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.recovery.joining import Alone
from ntp_plugin.recovery.rank_context import RankContext
from ntp_plugin.recovery.replica_comparison import ReplicaWatch
from ntp_plugin.recovery.voted_sections import Loop
from ntp_plugin.telemetry import Ended, EventWriter

_LOG = logging.getLogger(__name__)


class MegatronJob:
    """This process in a live job, from its arguments to its end."""

    def __init__(self, args: Any, policy: TrainingPolicy) -> None:
        place = RankContext.read()
        topology = _topology(place, policy, args)
        if torch.cuda.device_count() > 0 and args.distributed_backend != "gloo":
            torch.cuda.set_device(args.local_rank)
        timeout = timedelta(minutes=args.distributed_timeout_minutes)
        self.rank = ElasticRank(place, backend=args.distributed_backend, timeout=timeout)
        self.args, self.topology, self._policy = args, topology, policy
        args.async_strategy = "mcore"  # a thread of this rank writes, and no process of NVRx
        settings = fingerprints.settings(args, policy)  # before Megatron counts in the arguments
        # An export must not write into the events file of the run that made its copies.
        record = (policy.events or place.events) if place.export is None else None
        self.event_writer = EventWriter(record, str(topology.slot_of(place.slot)))
        if place.export is not None:
            export.only_to_save(args, place.export)
        self.model_rebuild, self.samples = ModelRebuild(args), SampleHooks(args, noted=self.event_writer.is_recording)
        stage = topology.slot_of(place.slot).stage
        self.scales = JobScales(args, self.model_rebuild, stage=stage, joiner=place.joining)
        self.state = LoopState(args, self.model_rebuild, self.samples, self.rank.groups, self.scales)
        self.loop = Loop(self.rank.groups, self.state, joiner=place.joining)
        self.trainer = MegatronTrainer(
            args,
            policy,
            topology,
            rank=self.rank,
            loop=self.loop,
            model_rebuild=self.model_rebuild,
            samples=self.samples,
            joiner=place.joining,
            event_writer=self.event_writer,
        )
        self.scales.is_idle = lambda: self.trainer.idle
        self.step = TrainingStep(
            args,
            self.loop,
            self.rank,
            self.trainer,
            surroundings=self.state,
            samples=self.samples,
            watch=ReplicaWatch(
                policy,
                topology,
                rank=self.rank,
                replicated_state=self.trainer.replicated_state,
                distrust=self.trainer.distrust,
                event_writer=self.event_writer,
            ),
            event_writer=self.event_writer,
        )
        self.saves = self.trainer.saves = UnfinishedSave(self)
        self.predictions = PredictionLog(self)
        self._alone = Alone()
        if place.joining:
            args.tp_comm_overlap = False  # the others make no user buffers with it
            args.load = args.pretrained_checkpoint = None  # the other ranks send it everything
            apply_all(self._alone.table())
        else:
            self.driver = self.rank.drive(self.trainer)
            self.rank.watch()
        same_settings.require_same(self.rank, settings, leaves=self._is_in_the_first_replica)
        self.rank.share_settings(settings.digest)
        apply_all((*hooks.table(self), *of_latent_attention(args)))
        if draws_exact_masks(args, policy):
            layout = self.trainer.layout()
            self.model_rebuild.masks = ExactDropout(
                layout, args, nominal_firsts(layout, args), strict=policy.dropout == "exact"
            )
            apply_all(of_masks(self.model_rebuild.masks))

    @property
    def _is_in_the_first_replica(self) -> bool:
        return self.topology.slot_of(self.rank.place.slot).replica == 0

    def model_is_built(self) -> None:
        """Begin the recovery state and copies: the last point before training at which all ranks are together."""
        if self.model_rebuild.masks is not None:
            self.model_rebuild.masks.into(self.model_rebuild.chunks)
        self.trainer.begin()
        if self.rank.place.export is not None:
            self._export(self.rank.place.export)
        self._warn()
        self.step.into(self.model_rebuild.optimizer)

    def _export(self, folder: Path) -> NoReturn:
        """Write the export, which is all that this process is for; the rest of the user's script is about training."""
        self.trainer.resume()
        slot = self.topology.slot_of(self.rank.place.slot)
        with contextlib.closing(EventWriter(self._policy.events, str(slot))) as event_writer:
            save = functools.partial(export.save, self.args, self.model_rebuild)
            exporting.write(save, self.driver, folder, step=self.args.iteration, event_writer=event_writer)
        self.rank.beat()
        self.loop.driver = self.driver
        end()
        sys.exit(0)

    def _warn(self) -> None:
        """Warn of losses that would end the job, while something can still be done about it."""
        if self.rank.place.slot:
            return
        self._warn_of_memory()
        if why := self.trainer.why_none_moves:
            _LOG.info("a replica that loses a pipeline stage is dropped, since %s", why)
        copies = self.trainer.copies
        if copies is not None:
            if copies.are_near_only:
                _LOG.warning(
                    "copies of what only one rank holds stay on its own host: the job survives a lost process, and a"
                    " lost host ends it"
                )
        elif self.args.use_distributed_optimizer:
            _LOG.warning(
                "--use-distributed-optimizer: a lost rank takes its part of the optimizer's state with it, and copies"
                " are off (--ntp-copies-mode), so a loss will end this job"
            )
        elif self.topology.expert_slots:
            _LOG.warning(
                "--num-experts: what a lost rank held is restored from copies, and copies are off (--ntp-copies-mode),"
                " so a loss will end this job"
            )
        elif self.topology.dp == 1:
            _LOG.warning(
                "there is one replica, so no other rank holds what a lost rank held, and copies are off"
                " (--ntp-copies-mode), so a loss will end this job"
            )

    def _warn_of_memory(self) -> None:
        width = self.trainer.too_large_below
        if width:
            hint = "" if self.args.calculate_per_token_loss else " (--calculate-per-token-loss lets them be smaller)"
            _LOG.warning(
                "a replica of fewer than %d slots would not fit into --ntp-gpu-memory-gb %s with its micro-batches%s,"
                " so it would be idle",
                width,
                self._policy.gpu_memory_gb,
                hint,
            )

    def begin_sections(self) -> None:
        """Begin the sections: from here on the job survives losses, and a joining rank takes part."""
        slot = self.topology.slot_of(self.rank.place.slot)
        training = fingerprints.training(self.args, dict(named(self.model_rebuild.chunks)), slot)
        same_settings.require_same(self.rank, training, leaves=self._is_in_the_first_replica)
        self.rank.beat()
        if self.rank.place.joining:
            self.rank.wait_for_admission()
            self.driver = self.rank.drive(self.trainer)
            self._alone.over = True
            self.rank.watch()
        self.trainer.resume()
        # Megatron's loop saves a checkpoint where it finds another number of micro-batches than it began with.
        update_num_microbatches(self.args.consumed_train_samples, consistency_check=False)
        self.loop.driver = self.driver
        self._record_start()

    def _record_start(self) -> None:
        each, framework = get_num_microbatches(), {"megatron-core": megatron.core.__version__}
        self.event_writer.write(
            self.rank.place.beginning(self._policy, self.topology, micro_batches=each, framework=framework)
        )

    def end_sections(self) -> None:
        """Compare what the training has come to with all ranks, when it is over."""
        if self.trainer.copies is not None or self.step.watch.is_on:
            self.loop.section(self.step.compare_at_the_end, lambda: None)

    def end(self) -> None:
        """End together with the other ranks: a process that ends without this counts as lost, whatever its exit
        code.

        Raises:
            NotSaved: The newest checkpoint could not be written.
        """
        if self.loop.driver is not None:
            self.driver.finish()
        if self.trainer.copies is not None:
            self.trainer.copies.close()
        failed_after = self.saves.progress.failed_after
        if not failed_after:
            self.event_writer.write(Ended())
        self.event_writer.close()
        self.rank.leave()
        require_saved(failed_after, self.args, has_copies=self.trainer.copies is not None)


def _topology(place: RankContext, policy: TrainingPolicy, args: Any) -> Topology:
    return place.topology(
        policy,
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        cp=args.context_parallel_size,
        dp_last=bool(args.use_tp_pp_dp_mapping),
        expert_slots=expert_slots(args),
    )


class Jobs:
    """The one job of this process, if it is a live one."""

    now: MegatronJob | None = None


def begin(args: Any, policy: TrainingPolicy) -> None:
    """Make this process a rank of a live job."""
    assert Jobs.now is None, "arguments are checked once"
    Jobs.now = MegatronJob(args, policy)


def end() -> None:
    """End the job after a script that ended well."""
    if Jobs.now is not None:
        sys.stdout.flush()
        Jobs.now.end()
        Jobs.now = None
