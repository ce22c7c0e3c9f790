"""Stream of torch batches for use outside of an Undula job, for example in a training loop of your own. Its position is a step."""

import atexit
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from undula.data.reader import SampleReader, Samples
from undula.data.spec import DataSpec, MixPart
from undula.data.stored.manifest import Manifest
from undula.data.stored.maps import SampleFunction
from undula.data.stored.mixture import Mixture, StoredData, load_data
from undula.data.stored.reader import stored_reader
from undula.data.stored.rows import Batch, concatenated
from undula.errors import ManifestError, UsageError
from undula.plan.plan import Plan, PlanSpec
from undula.plan.tree import assign


class Stream:
    """Iterable of a rank's batches, one per step. Each batch is the rank's share of the plan's global batch.

    The same plan gives the same global batches at any world size, and the world size can change at each resume.

    The stream has one position, which counts a batch from the moment at which it is returned. Iteration continues from the position, and
    starts over after the end of the plan. If `load_state_dict` changes the position during an iteration, the iteration goes on from there.
    Only one iterator can be in use: the first batch of another iterator ends it, and it then raises a UsageError.

    Attributes:
        plan: Plan of the samples that each step consumes.
        step: Index of the next step.
        ids: Ids of the samples of the last batch; shape [samples].
    """

    def __init__(
        self,
        data: StoredData,
        plan: PlanSpec,
        rank: int,
        world_size: int,
        reading: DataSpec,
        function: SampleFunction | None,
    ):
        if not 0 <= rank < world_size <= plan.virtual_workers:
            raise ManifestError(
                f"rank {rank} of {world_size} has none of the {plan.virtual_workers} virtual workers; "
                "choose 0 <= rank < world_size <= plan.virtual_workers"
            )
        self.plan = Plan(plan, data.num_rows)
        self.step = 0
        self._data = data
        self._virtual_workers = assign(plan.virtual_workers, world_size)[rank]
        self._reading = reading
        self._function = function
        self._reader: SampleReader | None = None
        """Reader of the iterator that began last."""

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches from the current position to the end of the plan.

        Raises:
            ManifestError: The data cannot be read.
            UsageError: Another iterator of the stream has begun, or the map returns what batches cannot hold.
        """
        while self.step < self.plan.total_steps:
            opened_for = self.step
            with self._opened() as reader:
                while opened_for == self.step < self.plan.total_steps:
                    samples = self._share(reader)
                    self.ids = samples.ids
                    # Before the yield, so that a state_dict() taken meanwhile counts the batch as consumed.
                    self.step = opened_for = self.step + 1
                    yield samples.batch
                    if self._reader is not reader:
                        raise UsageError(
                            "an iterator of the stream was continued after another one had begun, but they share the stream's position; "
                            "use one iterator at a time, or create a second stream"
                        )
        self.step = 0

    def __len__(self) -> int:
        """Return the number of batches from the current position to the end of the plan."""
        return self.plan.total_steps - self.step

    def state_dict(self) -> dict[str, Any]:
        """Return the position for `load_state_dict`. It is the same on every rank and can be loaded at any world size."""
        return {"step": self.step, "plan_digest": self.plan.digest(self._data.digest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position. An iteration that has begun goes on from there: its next batch is that of the new position.

        Raises:
            ManifestError: The position is from another plan or other data.
        """
        if state["plan_digest"] != self.plan.digest(self._data.digest):
            raise ManifestError(
                f"the position was saved with another plan or other data than {self._data.url}; create the stream with that plan and data"
            )
        self.step = int(state["step"])

    @contextmanager
    def _opened(self) -> Iterator[SampleReader]:
        """Open the samples from the current position on, in place of those of another iterator."""
        if self._reader:
            self._reader.close()
        reader = stored_reader(self._data, self.plan, self._virtual_workers, self._reading, self.step, self._function)
        self._reader = reader
        atexit.register(reader.close)  # otherwise a script that exits within a step would shut down Ray first and hang
        try:
            reader.open()
            yield reader
        finally:
            atexit.unregister(reader.close)
            reader.close()
            if self._reader is reader:
                self._reader = None

    def _share(self, reader: SampleReader) -> Samples:
        step_in_epoch = self.plan.step(self.step).step_in_epoch
        shares = [(v, self.plan.share(step_in_epoch, v)) for v in self._virtual_workers]
        taken = [reader.take(v, count) for v, count in shares if count]
        return concatenated(taken) if taken else reader.any_rows(0)


def stream(
    data: str | Manifest | Mapping[str, float],
    plan: PlanSpec,
    *,
    rank: int = 0,
    world_size: int = 1,
    map: SampleFunction | None = None,
    **reading: Any,
) -> Stream:
    """Stream a data set of sharded Parquet through Ray Data: every sample once per epoch, in an order independent of the world size.

    Args:
        data: URL of the data set, its manifest, or a weight for each of several URLs, which are mixed.
        plan: Plan with the global batch, virtual workers, epochs and shuffle.
        rank: Rank of this process.
        world_size: Number of ranks, at most plan.virtual_workers.
        map: Function (sample, random generator) -> sample, applied to each sample when it is read. It must return the same columns, types
            and shapes for every sample; the first row of the data determines which.
        reading: Fields of DataSpec: columns, head_mib, prefetch_mib, read_tasks, read_cpus.

    Returns:
        The stream of this rank.

    Raises:
        ManifestError: The data cannot be read, or the rank has no virtual worker.
        SpecError: The plan does not fit the data.
    """
    if isinstance(data, Manifest):
        return Stream(data, plan, rank, world_size, DataSpec(train=data.url, **reading), map)
    if isinstance(data, str):
        spec = DataSpec(train=data, **reading)
    else:
        spec = DataSpec(mix=tuple(MixPart(url, weight) for url, weight in data.items()), **reading)
    loaded = load_data(spec)
    if isinstance(loaded, Mixture):
        loaded.check_plan(plan)
    return Stream(loaded, plan, rank, world_size, spec, map)
