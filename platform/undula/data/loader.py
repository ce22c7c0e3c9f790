"""The stream for a trainer of one's own: an iterable of torch batches whose position is a step and no more."""

from collections.abc import Iterator
from typing import Any

from undula.data.manifest import Manifest, load_manifest
from undula.data.maps import SampleFunction
from undula.data.rank_stream import RankStream
from undula.data.rows import Batch, Samples, concatenated
from undula.data.spec import DataSpec
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
        manifest: Manifest,
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
        self.plan = Plan(plan, manifest.num_rows)
        self.step = 0
        self._manifest = manifest
        self._virtual_workers = assign(plan.virtual_workers, world_size)[rank]
        self._reading = reading
        self._function = function

    def __iter__(self) -> Iterator[Batch]:
        source = RankStream(self._manifest, self.plan, self._virtual_workers, self._reading, self.step, self._function)
        try:
            source.open()
            while self.step < self.plan.total_steps:
                samples = self._share(source)
                self.ids = samples.ids
                self.step += 1  # before the batch is out: a state_dict() taken while it is in use counts it as consumed
                yield samples.batch
            self.step = 0
        finally:
            source.close()

    def __len__(self) -> int:
        """Batches from the present position to the end of the plan."""
        return self.plan.total_steps - self.step

    def state_dict(self) -> dict[str, Any]:
        """The position: the same on every rank, and good for any world size."""
        return {"step": self.step, "plan_digest": self.plan.digest(self._manifest.digest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position; ManifestError where it is of another plan or other data."""
        if state["plan_digest"] != self.plan.digest(self._manifest.digest):
            raise ManifestError(
                f"the state is of another plan or other data than {self._manifest.url}: use the plan and the data it was taken with"
            )
        self.step = int(state["step"])

    def _share(self, source: RankStream) -> Samples:
        step_in_epoch = self.plan.step(self.step).step_in_epoch
        shares = [(v, self.plan.share(step_in_epoch, v)) for v in self._virtual_workers]
        taken = [source.take(self.step, v, count) for v, count in shares if count]
        return concatenated(taken) if taken else source.any_rows(0)


def stream(
    data: str | Manifest,
    plan: PlanSpec,
    *,
    rank: int = 0,
    world_size: int = 1,
    map: SampleFunction | None = None,
    **reading: Any,
) -> Stream:
    """Stream a data set of sharded Parquet through Ray Data, exactly once an epoch, in an order that no world size changes.

    Args:
        data: the data set's URL, or its manifest.
        plan: global batch, virtual workers, epochs, shuffle.
        rank, world_size: of this process; world_size may be up to plan.virtual_workers.
        map: applied to each sample where it is read: (sample, random generator) -> sample.
        reading: fields of DataSpec: columns, head_mib, prefetch_mib, read_tasks, read_cpus.
    """
    manifest = load_manifest(data) if isinstance(data, str) else data
    return Stream(manifest, plan, rank, world_size, DataSpec(train=manifest.url, **reading), map)
