"""The trainer for data parallelism: every rank is a replica and holds the whole model. `voted_step.py` has its step.

All ranks hold the same state. A joining rank gets it from the first rank that has it. After every recovery all ranks
compare a digest of their state before they train on.
"""

import hashlib
import io

import torch
import torch.distributed as dist

from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.errors import StateLost
from ntp_plugin.groups.process_groups import ElasticGroups
from ntp_plugin.membership.agreement import Agreed
from ntp_plugin.membership.protocol import Report
from ntp_plugin.plain.voted_step import LossOfSamples, VotedStep, samples_of
from ntp_plugin.planning.batch_split import NominalBatch, even_shares
from ntp_plugin.recovery.replica_comparison import ReplicatedState
from ntp_plugin.resharding.rebuild import WEIGHT

_EVEN = 1_000_000
"""Time of a micro-batch before any is measured: all ranks count as equally fast."""


class DataParallel(VotedStep):
    """A `Trainer`: every rank holds the whole model."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_of: LossOfSamples,
        *,
        groups: ElasticGroups,
        ranks: int,
        per_rank: int,
        micro_batch: int = 1,
        joiner: bool = False,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            loss_of,
            groups=groups,
            micro_batches=ranks * per_rank,
            micro_batch=micro_batch,
            joiner=joiner,
        )
        self._batch = NominalBatch(
            replicas=ranks, per_replica=per_rank, micro_batch=micro_batch, stages=1, healthy_ns=_EVEN
        )
        self._members = tuple(range(ranks))

    # ------------------------------------------------ a step

    @property
    def members(self) -> tuple[int, ...]:
        """The slots that train now: all live ones."""
        return self._members

    @property
    def is_in_the_first_replica(self) -> bool:
        """Whether this rank belongs to the replica whose settings a joining process compares with its own."""
        return self._groups.slot == 0

    def my_samples(self) -> list[int]:
        """Return the samples of a step that this rank computes, as numbers in the global batch."""
        return samples_of(even_shares(self.members, self._batch)[self._groups.slot], self._micro_batch)

    def _reduce(self, total: torch.Tensor) -> float:
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        dist.all_reduce(total)
        return float(total)

    # ------------------------------------------------ a recovery

    def report(self) -> Report:
        """Report the applied step. An update is made in place, so no older step can be restored."""
        return Report(applied=self.applied, oldest=self.applied, prepared=self._prepared, joiner=self._joiner)

    def plan(self, agreed: Agreed) -> str:
        """Return a digest of the members and the decision: the shares of the batch follow from the members alone."""
        return hashlib.blake2b(repr((agreed.view, agreed.decision)).encode(), digest_size=16).hexdigest()

    def resume_from(self, agreed: Agreed) -> None:
        """Roll forward, send the state to joining ranks, and compare it."""
        if self._groups.slot in agreed.decision.roll_forward:
            self._apply()
        self._members, self._prepared = agreed.view.slots, False
        veterans = [slot for slot, report in agreed.reports.items() if not report.joiner]
        if len(veterans) < len(agreed.reports):
            self._hand_over(self._groups.rank_of(min(veterans)))
        self.applied, self._joiner = agreed.decision.step, False
        self._compare_state()

    def _hand_over(self, giver: int) -> None:
        """Send the state of one rank to all others. Only a joining rank loads it; the others have it already."""
        state = [io.BytesIO()]
        if dist.get_rank() == giver:
            torch.save((self.model.state_dict(), self.optimizer.state_dict()), state[0])
        dist.broadcast_object_list(state, src=giver)
        if self._joiner:
            state[0].seek(0)
            model, optimizer = torch.load(state[0], weights_only=True)
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)

    def _compare_state(self) -> None:
        mine = self.digest()
        digests: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(digests, mine)
        if len(set(digests)) > 1:
            named = ", ".join(f"slot {slot} {digest}" for slot, digest in zip(self.members, digests, strict=True))
            raise StateLost(
                f"after the recovery the members hold different state at step {self.applied}: {named}",
                fix="restart from the last checkpoint",
            )

    def replicated_state(self) -> ReplicatedState:
        """Yield every parameter with the optimizer state of its shape. Each rank has all of it."""
        of = f"r{self._groups.slot}"
        for name, parameter in self.model.named_parameters():
            size = parameter.numel()
            tensor_slice = TensorSlice(
                tensor=name, shape=(size,), dim=0, ranges=((0, size),), start=0, stop=size, whole=of
            )
            kept = self.optimizer.state.get(parameter, {})
            entries = {key: value for key, value in kept.items() if getattr(value, "shape", None) == parameter.shape}
            if size:
                yield name, "", tensor_slice, {WEIGHT: parameter.data, **entries}

    def digest(self) -> str:
        """Return a digest of all parameters and optimizer state, bit for bit."""
        seen = hashlib.blake2b(digest_size=16)
        for tensor in self.model.state_dict().values():
            seen.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
        for index, state in sorted(self.optimizer.state_dict()["state"].items()):
            for name, value in sorted(state.items()):
                seen.update(f"{index} {name}".encode())
                seen.update(torch.as_tensor(value).reshape(-1).view(torch.uint8).numpy().tobytes())
        return seen.hexdigest()
