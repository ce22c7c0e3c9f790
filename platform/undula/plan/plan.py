"""The plan of a run: the samples that each step consumes, divided among virtual workers. It never mentions the world size."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from json import dumps
from typing import Annotated, Literal, assert_never

from annotated_types import Gt
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.errors import STRICT, SpecError
from undula.plan.precision import FP32, PrecisionSpec

Positive = Annotated[int, Gt(0)]


@dataclass(frozen=True)
class Permutations:
    """Permutations that an order of samples consists of."""

    of_row_groups: bool
    of_rows: bool
    """Whether the rows of each window are permuted."""


LastStep = Literal["short", "drop", "wrap"]
Shuffle = Literal["none", "row_groups", "window"]
SHUFFLES: Mapping[Shuffle, Permutations] = {
    "none": Permutations(of_row_groups=False, of_rows=False),
    "row_groups": Permutations(of_row_groups=True, of_rows=False),
    "window": Permutations(of_row_groups=True, of_rows=True),
}


@checked_dataclass(frozen=True, config=STRICT)
class PlanSpec:
    """Samples that the steps of a run consume, and their order."""

    global_batch: Positive = 64
    """Number of samples per optimizer step; must be a multiple of virtual_workers."""
    batch: Literal["fixed", "elastic"] = "fixed"
    """Whether the number of samples per step is fixed, or follows the number of workers. With an elastic batch, the learning rate follows
    by schedule.batch_rule."""
    batch_workers: Positive = 1
    """Number of workers that share one global_batch when the batch is elastic. Twice as many workers take two global batches per step; with
    fewer workers a step still takes one."""
    virtual_workers: Positive = 4
    """Number of logical data-parallel shards of a step. At most this many workers can share the work."""
    micro_batch: Positive | None = None
    """Maximum number of samples that run through the model at once; by default a virtual worker's whole share of a step."""
    epochs: Positive = 1
    """Number of passes over the training data."""
    max_steps: Positive | None = None
    """Maximum number of steps; the run ends after them even if its epochs have more."""
    seed: int = 0
    """Seed for the order of the samples, the initial weights, dropout and augmentation."""
    shuffle: Shuffle = "window"
    """Order of an epoch: as stored (none), with the row groups permuted (row_groups), or also with the rows permuted within windows of
    row groups (window). A dataset that the script gives to `run.dataset()` has no row groups; there, `window` permutes the whole epoch."""
    window: Positive = 4
    """Number of row groups in a shuffle window. A reader holds this many row groups in memory for each of its virtual workers."""
    last_step: LastStep = "short"
    """Last step of an epoch when the global batch does not divide the number of samples. `short` takes the remaining samples, and its
    gradient is the mean over them. `drop` leaves them out; these are different samples in each epoch. `wrap` fills the step up with
    samples from the beginning of the epoch."""

    def __post_init__(self) -> None:
        if self.global_batch % self.virtual_workers:
            below = self.global_batch // self.virtual_workers * self.virtual_workers
            nearest = f"{below} or {below + self.virtual_workers}" if below else str(self.virtual_workers)
            raise ValueError(
                f"global_batch is {self.global_batch}, which is not a multiple of virtual_workers ({self.virtual_workers}); "
                f"set it to {nearest}"
            )


@dataclass(frozen=True)
class StepShape:
    """Position and size of a step."""

    epoch: int
    step_in_epoch: int
    samples: int
    """Number of samples in the step."""
    samples_before: int
    """Number of samples that all earlier steps of the run consume."""


@dataclass(frozen=True)
class OptimizerStep:
    """Step of the optimizer: a step of the plan, or several if an elastic batch merges them."""

    index: int
    """Number of the first step of the plan."""
    merged_steps: int
    """Number of steps of the plan."""
    epoch: int
    samples: int
    """Number of samples in the step."""
    samples_after: int
    """Number of samples that the run has consumed after the step."""

    @property
    def done(self) -> int:
        """Number of steps of the plan that are committed after the step."""
        return self.index + self.merged_steps


@dataclass(frozen=True)
class MicroBatch:
    """Samples that run through the model at once."""

    step: int
    virtual_worker: int
    number: int
    """Index among the virtual worker's micro-batches in the step."""
    samples: int
    """Number of samples in the micro-batch."""


@dataclass(frozen=True)
class Plan:
    """A PlanSpec applied to a data set of `num_rows` rows."""

    spec: PlanSpec
    num_rows: int

    def __post_init__(self) -> None:
        if self.spec.virtual_workers > self.num_rows:
            raise SpecError(
                f"plan.virtual_workers is {self.spec.virtual_workers}, more than the {self.num_rows} samples of the "
                "data; set fewer virtual workers or use more data"
            )
        if not self.steps_per_epoch:
            raise SpecError(
                f"plan.global_batch is {self.spec.global_batch}, more than the {self.num_rows} samples of the data, and "
                "plan.last_step=drop leaves out steps that are not full; set a smaller global_batch or plan.last_step=short"
            )

    @property
    def virtual_worker_batch(self) -> int:
        """Number of samples of a virtual worker in a full step."""
        return self.spec.global_batch // self.spec.virtual_workers

    @property
    def full_steps(self) -> int:
        """Number of full steps in an epoch."""
        return self.num_rows // self.spec.global_batch

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in an epoch, including the last step that is not full unless it is dropped."""
        return self.full_steps + bool(self._samples_of_last)

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples that the steps of an epoch consume."""
        return self.full_steps * self.spec.global_batch + self._samples_of_last

    @property
    def _samples_of_last(self) -> int:
        """Number of samples of the step that follows the full steps of an epoch; 0 if there is no such step."""
        match self.spec.last_step:
            case "short":
                return self._rest
            case "drop":
                return 0
            case "wrap":
                return self.spec.global_batch if self._rest else 0
            case _:
                assert_never(self.spec.last_step)

    @property
    def _rest(self) -> int:
        """Number of rows that remain after the full steps of an epoch."""
        return self.num_rows % self.spec.global_batch

    @property
    def total_steps(self) -> int:
        """Number of steps in the run."""
        steps = self.spec.epochs * self.steps_per_epoch
        return min(steps, self.spec.max_steps) if self.spec.max_steps else steps

    @property
    def total_samples(self) -> int:
        """Number of samples that the run consumes."""
        return self.step(self.total_steps).samples_before

    def step(self, index: int) -> StepShape:
        """Return the shape of step `index`, counted from 0 over the whole run."""
        epoch, step_in_epoch = divmod(index, self.steps_per_epoch)
        first = step_in_epoch * self.spec.global_batch
        return StepShape(
            epoch=epoch,
            step_in_epoch=step_in_epoch,
            samples=min(self.spec.global_batch, self.samples_per_epoch - first),
            samples_before=epoch * self.samples_per_epoch + first,
        )

    def batch_factor(self, world_size: int) -> int:
        """Return the number of global batches that an optimizer step takes with `world_size` workers."""
        match self.spec.batch:
            case "fixed":
                return 1
            case "elastic":
                return max(world_size // self.spec.batch_workers, 1)
            case _:
                assert_never(self.spec.batch)

    def merged_steps(self, index: int, world_size: int) -> int:
        """Return how many steps of the plan, from `index` on, `world_size` workers merge into one optimizer step.

        The number is 1 unless the batch is elastic. Merged steps never extend beyond the end of an epoch or of the run.
        """
        left = min(self.steps_per_epoch - index % self.steps_per_epoch, self.total_steps - index)
        return min(self.batch_factor(world_size), left)

    def optimizer_step(self, index: int, world_size: int) -> OptimizerStep:
        """Return the step of the optimizer that begins with step `index`, on `world_size` workers."""
        merged_steps = self.merged_steps(index, world_size)
        shapes = [self.step(number) for number in range(index, index + merged_steps)]
        samples = sum(shape.samples for shape in shapes)
        return OptimizerStep(index, merged_steps, shapes[0].epoch, samples, shapes[0].samples_before + samples)

    def share(self, step_in_epoch: int, virtual_worker: int) -> int:
        """Return a virtual worker's number of samples in a step. A short step is shared as evenly as possible, so it can be zero."""
        is_last = step_in_epoch == self.full_steps
        return self._share_of_last(virtual_worker) if is_last else self.virtual_worker_batch

    def stream_length(self, virtual_worker: int) -> int:
        """Return the number of rows of an epoch that belong to a virtual worker."""
        # The last step leaves out all rows of the rest, or none; if it has more samples than the rest, it repeats other rows.
        own = min(self._share_of_rest(virtual_worker), self._share_of_last(virtual_worker))
        return self.full_steps * self.virtual_worker_batch + own

    def consumed(self, virtual_worker: int) -> int:
        """Return how many samples a virtual worker consumes in an epoch: its rows, plus those it repeats to fill the last step."""
        return self.full_steps * self.virtual_worker_batch + self._share_of_last(virtual_worker)

    def position(self, step: int, virtual_worker: int) -> int:
        """Return how many samples of the run a virtual worker consumes before step `step`."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        return epoch * self.consumed(virtual_worker) + step_in_epoch * self.virtual_worker_batch

    def _share_of_last(self, virtual_worker: int) -> int:
        """Return a virtual worker's number of samples in the step that follows the full steps of an epoch; 0 if there is no such step."""
        match self.spec.last_step:
            case "short":
                return self._share_of_rest(virtual_worker)
            case "drop":
                return 0
            case "wrap":
                return self.virtual_worker_batch if self._rest else 0
            case _:
                assert_never(self.spec.last_step)

    def _share_of_rest(self, virtual_worker: int) -> int:
        return self._rest // self.spec.virtual_workers + (virtual_worker < self._rest % self.spec.virtual_workers)

    def micro_batches(self, step_in_epoch: int, virtual_worker: int) -> tuple[int, ...]:
        """Return the sizes of a virtual worker's micro-batches in a step."""
        share = self.share(step_in_epoch, virtual_worker)
        size = self.spec.micro_batch or max(share, 1)
        return tuple(min(size, share - start) for start in range(0, share, size))

    def sizes(self) -> frozenset[int]:
        """Return the sizes of all micro-batches of the run, among them 0 if a virtual worker has no share of some step."""
        steps = {
            0,
            min(self.steps_per_epoch, self.total_steps) - 1,
        }  # the other steps of an epoch are like the first one
        works = [self.micro_batches(step, v) for step in steps for v in range(self.spec.virtual_workers)]
        return frozenset(size for work in works for size in work or (0,))

    def work(self, steps: range, virtual_workers: range) -> list[MicroBatch]:
        """Return the micro-batches of some virtual workers in steps that are merged, or in one step, in order.

        The gradient of a virtual worker is complete before that of the next one begins.
        """
        return [
            MicroBatch(step, virtual_worker, number, samples)
            for virtual_worker in virtual_workers
            for step in steps
            for number, samples in enumerate(self.micro_batches(self.step(step).step_in_epoch, virtual_worker))
        ]

    def aligned_work(self, steps: range, shares: Sequence[range], rank: int) -> list[MicroBatch]:
        """Return the micro-batches of a rank, of which every rank has as many in steps that are merged, or in one step.

        The n-th virtual workers of all ranks run at the same time. A rank runs a micro-batch without samples where it has fewer.

        Args:
            steps: The steps.
            shares: Virtual workers of each rank.
            rank: The rank.
        """
        work: list[MicroBatch] = []
        for place in range(max(map(len, shares))):
            works = [self.work(steps, share[place : place + 1]) for share in shares]
            own = works[rank]
            # Otherwise like the one that another rank runs, because the script may look at its number.
            padding = [replace(each, samples=0) for each in max(works, key=len)[len(own) :]]
            work += own + padding
        return work

    def digest(self, manifest_digest: str, precision: PrecisionSpec = FP32) -> str:
        """Return the identity of the logical run: runs with equal digests consume the same samples at the same steps, in one precision."""
        identity = {"plan": asdict(self.spec), "manifest": manifest_digest}
        if precision.compute != "fp32":  # the digest of an fp32 run is the same as in versions without a precision
            identity["precision"] = asdict(precision)
        text = dumps(identity, sort_keys=True)
        return sha256(text.encode()).hexdigest()
