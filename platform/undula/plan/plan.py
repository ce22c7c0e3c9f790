"""The plan of a run: which samples each step consumes, cut into virtual workers. It never mentions the world size."""

import itertools
from dataclasses import asdict, dataclass
from hashlib import sha256
from json import dumps
from typing import Annotated, Literal

from annotated_types import Gt
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.errors import SpecError

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
Positive = Annotated[int, Gt(0)]


@checked_dataclass(frozen=True, config=STRICT)
class PlanSpec:
    """What a step consumes."""

    global_batch: Positive = 64
    """Samples per optimizer step; must be a multiple of virtual_workers."""
    batch: Literal["fixed", "elastic"] = "fixed"
    """Whether a step's samples stay the same, whatever the cluster, or follow the number of workers; the learning rate then follows by
    schedule.batch_rule."""
    batch_workers: Positive = 1
    """Workers that one global_batch is for, where the batch is elastic: twice as many take twice as many samples in a step, and fewer
    than this no fewer."""
    virtual_workers: Positive = 4
    """Logical data-parallel shards of a step. At most this many workers can share the work."""
    micro_batch: Positive | None = None
    """Most samples that run through the model at once; by default a virtual worker's whole share."""
    epochs: Positive = 1
    """Times that the run goes through the training data."""
    max_steps: Positive | None = None
    """Ends the run after so many steps, where the epochs would make more."""
    seed: int = 0
    """Seeds the order of the samples, the weights at the start, dropout and augmentation."""
    shuffle: Literal["none", "row_groups", "window"] = "window"
    """Order of an epoch: as stored; row groups permuted; or also rows permuted within a window of row groups."""
    window: Positive = 4
    """Row groups in a shuffle window. A reader holds that many in memory for each of its virtual workers."""
    last_step: Literal["short", "drop", "wrap"] = "short"
    """An epoch's last step, where the global batch does not divide the samples: short, its gradient the mean over what it has;
    dropped, so that an epoch leaves some samples out, others each time; or filled up with samples from the epoch's beginning."""

    def __post_init__(self) -> None:
        if self.global_batch % self.virtual_workers:
            below = self.global_batch // self.virtual_workers * self.virtual_workers
            nearest = f"{below} or {below + self.virtual_workers}" if below else str(self.virtual_workers)
            raise ValueError(
                f"global_batch is {self.global_batch}, which virtual_workers ({self.virtual_workers}) does not divide: "
                f"give {nearest}"
            )


@dataclass(frozen=True)
class StepShape:
    """How many samples a step has, and from where in its epoch."""

    epoch: int
    step_in_epoch: int
    samples: int
    samples_before: int
    """Samples of the whole run that the steps before consumed."""


@dataclass(frozen=True)
class MicroBatch:
    """Samples that run through the model at once."""

    step: int
    virtual_worker: int
    number: int
    """Among those of its virtual worker in its step."""
    samples: int


@dataclass(frozen=True)
class Plan:
    """A PlanSpec applied to a data set of `num_rows` rows."""

    spec: PlanSpec
    num_rows: int

    def __post_init__(self) -> None:
        if self.spec.virtual_workers > self.num_rows:
            raise SpecError(
                f"plan.virtual_workers is {self.spec.virtual_workers}, more than the {self.num_rows} samples of the "
                "training data: give fewer virtual workers, or more data"
            )
        if not self.steps_per_epoch:
            raise SpecError(
                f"plan.global_batch is {self.spec.global_batch}, more than the {self.num_rows} samples of the training data, "
                "and plan.last_step drops what does not fill a batch: give a smaller batch, or another last_step"
            )

    @property
    def virtual_worker_batch(self) -> int:
        """Samples that a virtual worker has in a full step."""
        return self.spec.global_batch // self.spec.virtual_workers

    @property
    def full_steps(self) -> int:
        """Full steps of an epoch."""
        return self.num_rows // self.spec.global_batch

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch, with the one at its end that takes what is left, unless that is dropped."""
        return self.full_steps + bool(self._rest and self.spec.last_step != "drop")

    @property
    def samples_per_epoch(self) -> int:
        """Samples that an epoch's steps consume."""
        return self.steps_per_epoch * self.spec.global_batch if self.spec.last_step != "short" else self.num_rows

    @property
    def _rest(self) -> int:
        """Rows that do not fill a step."""
        return self.num_rows % self.spec.global_batch

    @property
    def total_steps(self) -> int:
        steps = self.spec.epochs * self.steps_per_epoch
        return min(steps, self.spec.max_steps) if self.spec.max_steps else steps

    @property
    def total_samples(self) -> int:
        """Samples that the whole run consumes."""
        return self.step(self.total_steps).samples_before

    def step(self, index: int) -> StepShape:
        """The shape of step `index`, counted from 0 over the whole run."""
        epoch, step_in_epoch = divmod(index, self.steps_per_epoch)
        first = step_in_epoch * self.spec.global_batch
        return StepShape(
            epoch=epoch,
            step_in_epoch=step_in_epoch,
            samples=min(self.spec.global_batch, self.samples_per_epoch - first),
            samples_before=epoch * self.samples_per_epoch + first,
        )

    def batch_factor(self, world_size: int) -> int:
        """Global batches that a step takes with so many workers."""
        return max(world_size // self.spec.batch_workers, 1) if self.spec.batch == "elastic" else 1

    def span(self, index: int, world_size: int) -> int:
        """Steps of the plan from `index` on that so many workers take in one step of the optimizer: none beyond an epoch or the run."""
        left = min(self.steps_per_epoch - index % self.steps_per_epoch, self.total_steps - index)
        return min(self.batch_factor(world_size), left)

    def share(self, step_in_epoch: int, virtual_worker: int) -> int:
        """Samples of one virtual worker in a step. A short step is shared as evenly as it goes, so some may get none."""
        is_short = step_in_epoch == self.full_steps and self.spec.last_step == "short"
        return self._share_of_rest(virtual_worker) if is_short else self.virtual_worker_batch

    def stream_length(self, virtual_worker: int) -> int:
        """Rows of an epoch that belong to a virtual worker."""
        rest = 0 if self.spec.last_step == "drop" else self._share_of_rest(virtual_worker)
        return self.full_steps * self.virtual_worker_batch + rest

    def consumed(self, virtual_worker: int) -> int:
        """Samples that a virtual worker consumes in an epoch: its rows, and those that it takes again to fill the last step."""
        if self.spec.last_step == "wrap":
            return self.steps_per_epoch * self.virtual_worker_batch
        return self.stream_length(virtual_worker)

    def position(self, step: int, virtual_worker: int) -> int:
        """Samples of the whole run that a virtual worker consumes before step `step`."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        return epoch * self.consumed(virtual_worker) + step_in_epoch * self.virtual_worker_batch

    def _share_of_rest(self, virtual_worker: int) -> int:
        return self._rest // self.spec.virtual_workers + (virtual_worker < self._rest % self.spec.virtual_workers)

    def micro_batches(self, step_in_epoch: int, virtual_worker: int) -> tuple[int, ...]:
        """Sizes of the micro-batches of one virtual worker in a step."""
        share = self.share(step_in_epoch, virtual_worker)
        size = self.spec.micro_batch or max(share, 1)
        return tuple(min(size, share - start) for start in range(0, share, size))

    def work(self, steps: range, virtual_workers: range) -> list[MicroBatch]:
        """The micro-batches of some virtual workers in some steps, in order."""
        return [
            MicroBatch(step, virtual_worker, number, samples)
            for step in steps
            for virtual_worker in virtual_workers
            for number, samples in enumerate(self.micro_batches(self.step(step).step_in_epoch, virtual_worker))
        ]

    def rounds(self, steps: range, world_size: int) -> int:
        """The most micro-batches that a rank of so many has in some steps."""
        return max(len(self.work(steps, of_rank)) for of_rank in assign(self.spec.virtual_workers, world_size))

    def digest(self, manifest_digest: str) -> str:
        """Identity of the logical run: equal digests consume the same samples at the same steps."""
        text = dumps({"plan": asdict(self.spec), "manifest": manifest_digest}, sort_keys=True)
        return sha256(text.encode()).hexdigest()


def assign(virtual_workers: int, world_size: int) -> tuple[range, ...]:
    """The virtual workers of each rank: contiguous, and as even as it goes. The only place where V meets W."""
    cuts = [rank * virtual_workers // world_size for rank in range(world_size + 1)]
    return tuple(range(start, stop) for start, stop in itertools.pairwise(cuts))
