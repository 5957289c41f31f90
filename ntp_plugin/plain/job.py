"""`elastic_job` and `tensor_parallel_job`: the functions by which a PyTorch script joins a job of `ntp run`.

    with elastic_job(model, optimizer, loss_of, per_rank=4) as job:
        while job.steps_done < 1000:
            loss = job.step()

`loss_of(step, samples)` returns the sum of the losses of some samples of a step's global batch, given by their numbers.
The samples of a rank depend on which ranks are alive, and the gradient is always that of the whole batch. A rank that
takes the place of a lost one begins with the others' weights, whatever its own are.

A model whose layers are cut over several ranks is built for the place of this process in its replica:

    with tensor_parallel_job(build, loss_of, tp=2, per_replica=8) as job: ...

`build(group)` returns the model, made of `ColumnParallel` and `RowParallel` layers in that group, and its optimizer;
`loss_of(model, step, samples)` is as above.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch

from ntp_plugin.config import schema
from ntp_plugin.config.sections import TrainingPolicy
from ntp_plugin.errors import NtpError
from ntp_plugin.plain import fingerprints
from ntp_plugin.plain.data_parallel import DataParallel
from ntp_plugin.plain.parallel_layers import TensorParallelGroup
from ntp_plugin.plain.tensor_parallel import TensorParallel
from ntp_plugin.plain.voted_step import LossOfSamples, Samples
from ntp_plugin.recovery import same_settings
from ntp_plugin.recovery.driver import Driver
from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.recovery.rank_context import RankContext
from ntp_plugin.recovery.replica_comparison import ReplicaWatch
from ntp_plugin.telemetry import EventWriter


class ElasticJob:
    """One rank of a job that survives the loss of other ranks. `elastic_job` and `tensor_parallel_job` make it."""

    def __init__(self, trainer: DataParallel | TensorParallel, driver: Driver, watch: ReplicaWatch) -> None:
        self._trainer, self._driver, self._watch = trainer, driver, watch

    @property
    def steps_done(self) -> int:
        """How many optimizer steps the job has applied; a rank that joins late counts those of the others."""
        return self._trainer.applied

    @property
    def members(self) -> tuple[int, ...]:
        """The slots that train now, in ascending order. A lost slot is absent until a new process takes it."""
        return self._trainer.members

    def step(self) -> float:
        """Take one optimizer step. If a rank is lost during it, the others recover and take the step again.

        Returns:
            The mean loss over the global batch, the same on all ranks.

        Raises:
            StateLost: No live rank holds some of the state of a lost one.
            BelowMinimum: No replica is left that may train.
            SilentCorruption: Replicas hold different bits of replicated state.
        """

        number = self._trainer.applied + 1

        def attempt() -> float:
            if self._trainer.applied == number:  # a recovery has applied it, because others had
                return self._trainer.loss
            self._watch.look(self._trainer.applied)
            return self._trainer.step()

        return self._driver.run_with_recovery(attempt)

    def compare(self) -> None:
        """Compare the replicas before the script writes a checkpoint. All ranks call it after the same step.

        Raises:
            SilentCorruption: Replicas hold different bits of replicated state.
        """
        epoch = self._driver.target_epoch

        def attempt() -> None:
            if self._driver.target_epoch == epoch:  # after a recovery, which has compared them already
                self._compare()

        self._driver.run_with_recovery(attempt)

    def _compare(self) -> None:
        self._watch.before_it_counts(self._trainer.applied)

    def end(self) -> None:
        """Wait for all ranks, compare the replicas, and end together. The `with` block calls it."""
        self._driver.at_the_end(self._compare)


@contextlib.contextmanager
def elastic_job(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: LossOfSamples,
    *,
    per_rank: int,
    micro_batch: int = 1,
    timeout: timedelta = timedelta(minutes=30),
    watch_steps: int | None = None,
    on_sdc: str = "stop",
) -> Iterator[ElasticJob]:
    """Join the job that `ntp run` started, as one replica of a data-parallel job. Use it in a `with` statement.

    An `NtpError` within the block ends the process with one line and its exit code.

    Args:
        model: The whole model, on every rank. A rank that takes the place of a lost one gets the others' weights.
        optimizer: Its optimizer; the job calls `step` and `zero_grad`.
        loss_of: `loss_of(step, samples)` returns the sum of the losses of some samples of a step's global batch. The
            samples of a rank depend on which ranks are alive, so a sample must follow from the step and its number
            alone.
        per_rank: Micro-batches that each rank computes in a step while no rank is lost.
        micro_batch: Samples in a micro-batch.
        timeout: How long a collective may take.
        watch_steps: Steps between two comparisons of the replicas, 0 for none. By default comparisons may take 0.5 %
            of the step time, and there is one at least every 100 steps.
        on_sdc: What to do about a replica that holds other bits than most: `"stop"` ends the job; with `"heal"` its
            ranks leave as if they had died, and the others go on.

    Yields:
        The job, on which the script calls `step`.

    Raises:
        ConfigError: `ntp run` did not start this process, or an argument is wrong.

    Examples:
        ```python
        with elastic_job(model, optimizer, loss_of, per_rank=4) as job:
            while job.steps_done < 1000:
                loss = job.step()
        ```
    """

    def trainer(rank: ElasticRank) -> DataParallel:
        return DataParallel(
            model,
            optimizer,
            loss_of,
            groups=rank.groups,
            ranks=rank.place.slots,
            per_rank=per_rank,
            micro_batch=micro_batch,
            joiner=rank.place.joining,
        )

    settings = {"per_rank": per_rank, "micro_batch": micro_batch}
    with _driven(trainer, timeout, settings, _policy(watch_steps, on_sdc)) as job:
        yield job


type BuildModel = Callable[[TensorParallelGroup], tuple[torch.nn.Module, torch.optim.Optimizer]]
type LossOfModel = Callable[[torch.nn.Module, int, Samples], torch.Tensor]


@contextlib.contextmanager
def tensor_parallel_job(
    build: BuildModel,
    loss_of: LossOfModel,
    *,
    tp: int,
    per_replica: int,
    micro_batch: int = 1,
    min_width: int = 1,
    timeout: timedelta = timedelta(minutes=30),
    watch_steps: int | None = None,
    on_sdc: str = "stop",
) -> Iterator[ElasticJob]:
    """Join the job that `ntp run` started, as one rank of a replica whose layers are cut over `tp` ranks.

    A replica that loses a rank goes on with fewer ranks: they take over the lost rank's features, and the replica gets
    fewer samples. Use it as `elastic_job`.

    Args:
        build: `build(group)` returns the model, with `ColumnParallel` and `RowParallel` layers in that group, and its
            optimizer. It must draw the same complete model on every rank.
        loss_of: `loss_of(model, step, samples)`, as in `elastic_job`.
        tp: Ranks in a replica.
        per_replica: Micro-batches that each replica computes in a step while no rank is lost.
        micro_batch: Samples in a micro-batch.
        min_width: A replica with fewer ranks than this does not train until it has enough of them again.
        timeout: How long a collective may take.
        watch_steps: As in `elastic_job`.
        on_sdc: As in `elastic_job`.

    Yields:
        The job, on which the script calls `step`.

    Raises:
        ConfigError: `ntp run` did not start this process, or an argument is wrong.
        Refused: The number of ranks is not a multiple of `tp`, or the model cannot be cut.

    Examples:
        ```python
        def build(group: TensorParallelGroup) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
            model = torch.nn.Sequential(
                ColumnParallel(8, 32, group, family="hidden"),
                torch.nn.Tanh(),
                RowParallel(32, 1, group, family="hidden"),
            )
            return model, torch.optim.Adam(model.parameters())


        with tensor_parallel_job(build, loss_of, tp=2, per_replica=8) as job:
            while job.steps_done < 1000:
                loss = job.step()
        ```
    """

    def trainer(rank: ElasticRank) -> TensorParallel:
        group = TensorParallelGroup(rank.place.slot % tp, tp)
        model, optimizer = build(group)
        return TensorParallel(
            model,
            optimizer,
            lambda step, samples: loss_of(model, step, samples),
            groups=rank.groups,
            within=group,
            ranks=rank.place.slots,
            per_replica=per_replica,
            micro_batch=micro_batch,
            min_width=min_width,
            joiner=rank.place.joining,
        )

    settings = {"tp": tp, "per_replica": per_replica, "micro_batch": micro_batch, "min_width": min_width}
    with _driven(trainer, timeout, settings, _policy(watch_steps, on_sdc), tp=tp) as job:
        yield job


@contextlib.contextmanager
def _driven(
    make: Callable[[ElasticRank], DataParallel | TensorParallel],
    timeout: timedelta,
    settings: Mapping[str, Any],
    policy: TrainingPolicy,
    *,
    tp: int = 1,
) -> Iterator[ElasticJob]:
    place = RankContext.read()
    rank = ElasticRank(place, timeout=timeout)
    try:
        trainer = make(rank)
        driver = _driver(rank, trainer, {**settings, "watch_steps": policy.watch_steps, "on_sdc": policy.on_sdc})
        job = ElasticJob(trainer, driver, _watch(rank, trainer, policy, tp=tp))
        yield job
        job.end()
    except NtpError as error:
        print(f"ntp: slot {place.slot}: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    finally:
        rank.leave()


def _policy(watch_steps: int | None, on_sdc: str) -> TrainingPolicy:
    given = {"on_sdc": on_sdc} | ({} if watch_steps is None else {"watch_steps": watch_steps})
    return schema.read(TrainingPolicy, given, where="")


def _watch(
    rank: ElasticRank, trainer: DataParallel | TensorParallel, policy: TrainingPolicy, *, tp: int
) -> ReplicaWatch:
    topology = rank.place.topology(policy, tp=tp)
    watch = ReplicaWatch(
        policy,
        topology,
        rank=rank,
        replicated_state=trainer.replicated_state,
        distrust=lambda _: None,  # there are no copies to distrust
        event_writer=EventWriter(None, str(topology.slot_of(rank.place.slot))),
    )
    trainer.not_finite = lambda: watch.not_finite(trainer.applied)
    return watch


def _driver(rank: ElasticRank, trainer: DataParallel | TensorParallel, settings: Mapping[str, Any]) -> Driver:
    """Return the driver of a rank, after comparing its settings with those of all others: founders compare theirs with
    each other, and a joining process compares its own before the others see it."""
    mine = fingerprints.of(trainer, settings)
    if rank.place.joining:
        same_settings.require_same(rank, mine, leaves=False)
        driver = rank.drive(trainer)
    else:
        driver = rank.drive(trainer)
        rank.watch()
        same_settings.require_same(rank, mine, leaves=trainer.is_in_the_first_replica)
    rank.beat()
    if rank.place.joining:
        rank.watch()
    return driver
