"""The stream for a trainer of one's own: an iterable of torch batches whose position is a step and no more."""

import atexit
from collections.abc import Iterator, Mapping
from typing import Any

from undula.data.manifest import Manifest
from undula.data.maps import SampleFunction
from undula.data.mixture import Data, Mixture, load_data
from undula.data.rows import Batch, Samples, concatenated
from undula.data.spec import DataSpec, MixPart
from undula.data.streams import Stream as SampleStream
from undula.data.streams import rank_stream
from undula.errors import ManifestError
from undula.plan.plan import Plan, PlanSpec, assign


class Stream:
    """A rank's batches, one a step: its share of the plan's global batch.

    The same plan gives the same global batches at any world size, which may change at each resume. Iterating goes on from where the
    stream stands; at the end of the plan it stands at its beginning again.

    Attributes:
        plan: what each step consumes.
        step: the step that comes next.
        ids: of the samples of the last batch; shape [samples].
    """

    def __init__(
        self,
        data: Data,
        plan: PlanSpec,
        rank: int,
        world_size: int,
        reading: DataSpec,
        function: SampleFunction | None,
    ):
        if not 0 <= rank < world_size <= plan.virtual_workers:
            raise ManifestError(
                f"rank {rank} of {world_size} has no part in {plan.virtual_workers} virtual workers: "
                "0 <= rank < world_size <= plan.virtual_workers must hold"
            )
        self.plan = Plan(plan, data.num_rows)
        self.step = 0
        self._data = data
        self._virtual_workers = assign(plan.virtual_workers, world_size)[rank]
        self._reading = reading
        self._function = function

    def __iter__(self) -> Iterator[Batch]:
        source = rank_stream(self._data, self.plan, self._virtual_workers, self._reading, self.step, self._function)
        atexit.register(source.close)  # else a script that ends within a step would end Ray first, and wait for it
        try:
            source.open()
            while self.step < self.plan.total_steps:
                samples = self._share(source)
                self.ids = samples.ids
                self.step += 1  # before the batch is out: a state_dict() taken while it is in use counts it as consumed
                yield samples.batch
            self.step = 0
        finally:
            atexit.unregister(source.close)
            source.close()

    def __len__(self) -> int:
        """Batches from the present position to the end of the plan."""
        return self.plan.total_steps - self.step

    def state_dict(self) -> dict[str, Any]:
        """The position: the same on every rank, and good for any world size."""
        return {"step": self.step, "plan_digest": self.plan.digest(self._data.digest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position; ManifestError where it is of another plan or other data."""
        if state["plan_digest"] != self.plan.digest(self._data.digest):
            raise ManifestError(
                f"the state is of another plan or other data than {self._data.url}: use the plan and the data it was taken with"
            )
        self.step = int(state["step"])

    def _share(self, source: SampleStream) -> Samples:
        step_in_epoch = self.plan.step(self.step).step_in_epoch
        shares = [(v, self.plan.share(step_in_epoch, v)) for v in self._virtual_workers]
        taken = [source.take(v, count) for v, count in shares if count]
        return concatenated(taken) if taken else source.any_rows(0)


def stream(
    data: str | Manifest | Mapping[str, float],
    plan: PlanSpec,
    *,
    rank: int = 0,
    world_size: int = 1,
    map: SampleFunction | None = None,
    **reading: Any,
) -> Stream:
    """Stream a data set of sharded Parquet through Ray Data, exactly once an epoch, in an order that no world size changes.

    Args:
        data: the data set's URL, its manifest, or several URLs with a weight each, which are mixed.
        plan: global batch, virtual workers, epochs, shuffle.
        rank, world_size: of this process; world_size may be up to plan.virtual_workers.
        map: applied to each sample where it is read: (sample, random generator) -> sample.
        reading: fields of DataSpec: columns, head_mib, prefetch_mib, read_tasks, read_cpus.
    """
    if isinstance(data, Manifest):
        return Stream(data, plan, rank, world_size, DataSpec(train=data.url, **reading), map)
    if isinstance(data, str):
        spec = DataSpec(train=data, **reading)
    else:
        spec = DataSpec(mix=tuple(MixPart(url, weight) for url, weight in data.items()), **reading)
    found = load_data(spec)
    if isinstance(found, Mixture):
        found.check_plan(plan)
    return Stream(found, plan, rank, world_size, spec, map)
