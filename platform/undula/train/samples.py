"""Sources of a run's samples: data that the job's YAML names, or a dataset of the script."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Protocol

from undula.data.reader import SampleReader
from undula.data.script.indexed import IndexedData, ScriptData
from undula.data.script.items import Items
from undula.data.script.loader_processes import Loader
from undula.data.script.reader import ScriptReader
from undula.data.stored.manifest import Manifest, load_manifest
from undula.data.stored.maps import SampleFunction
from undula.data.stored.mixture import StoredData
from undula.data.stored.reader import stored_reader
from undula.errors import UsageError
from undula.parallel.layout import Layout
from undula.plan.plan import Plan, PlanSpec
from undula.train.job import Job


class SampleSource(Protocol):
    """Source of the samples of some virtual workers. The readers are not open yet."""

    @property
    def has_validation(self) -> bool:
        """Whether there are validation data, which the other members for validations need."""

    @property
    def validation_plan(self) -> Plan:
        """Plan of a validation."""

    def training(self, step: int) -> SampleReader:
        """Return the training samples from a step on."""

    def validation(self) -> SampleReader:
        """Return the samples of a validation."""

    def free(self) -> None:
        """Free the datasets of this process, which the next group makes anew. Loader processes stay."""


class StoredSamples:
    """Samples of data that the job's YAML names.

    Args:
        job: Settings of the job.
        data: Training data.
        virtual_workers: Virtual workers of the rank.
        maps: Transforms of the samples of the training and of the validation data; None for none.
    """

    def __init__(
        self,
        job: Job,
        data: StoredData,
        virtual_workers: range,
        maps: tuple[SampleFunction | None, SampleFunction | None],
    ):
        self._job = job
        self._data = data
        self._virtual_workers = virtual_workers
        self._map, self._validation_map = maps
        self._plan = Plan(job.plan, data.num_rows)
        self.has_validation = job.data.validation is not None

    @cached_property
    def _validation_data(self) -> Manifest:
        assert self._job.data.validation is not None
        return load_manifest(self._job.data.validation)

    @property
    def validation_plan(self) -> Plan:
        return validation_plan(self._job, self._validation_data.num_rows)

    def training(self, step: int) -> SampleReader:
        return stored_reader(self._data, self._plan, self._virtual_workers, self._job.data, step, self._map)

    def validation(self) -> SampleReader:
        spec, function = self._job.data, self._validation_map
        return stored_reader(self._validation_data, self.validation_plan, self._virtual_workers, spec, 0, function)

    def free(self) -> None:
        """Do nothing, because the manifests are small."""


class ScriptSamples:
    """Samples of a script's dataset.

    Args:
        job: Settings of the job.
        data: Length and identity of the datasets.
        layout: Layout of the worker group.
        training: Dataset of the training.
        validation: Dataset of the validations; None for none.
        loader_of: Function that returns the loader with a name.
    """

    def __init__(
        self,
        job: Job,
        data: ScriptData,
        layout: Layout,
        training: Items,
        validation: Items | None,
        loader_of: Callable[[str], Loader],
    ):
        self._job, self._data = job, data
        self._virtual_workers = layout.virtual_workers(job.plan.virtual_workers)
        self._world_size = layout.num_cells
        self._items, self._validation_items = training, validation
        self.has_validation = validation is not None
        self._loader = loader_of("training loader")
        self._validation_loader = None if validation is None else loader_of("validation loader")
        self._plan = Plan(job.plan, data.training.num_rows)

    @property
    def validation_plan(self) -> Plan:
        assert self._data.validation is not None
        return validation_plan(self._job, self._data.validation.num_rows)

    def free(self) -> None:
        for loader in (self._loader, self._validation_loader):
            if loader is not None:
                loader.free()

    def training(self, step: int) -> ScriptReader:
        own, world_size = self._virtual_workers, self._world_size
        return ScriptReader(self._items, self._loader, self._plan, own, step, "training", world_size)

    def validation(self) -> ScriptReader:
        assert self._validation_items is not None
        assert self._validation_loader is not None
        return ScriptReader(
            self._validation_items,
            self._validation_loader,
            self.validation_plan,
            self._virtual_workers,
            0,
            "validation",
        )


def require_same(data: ScriptData, job: Job) -> None:
    """Check that the script has given this process the data that it gave the driver.

    Raises:
        UsageError: The data differ, or the job's YAML names the data.
    """
    if job.script_data is None:
        raise UsageError(
            "run.dataset() was called, but the job has data.train or data.mix; remove them, or the call of run.dataset()"
        )
    pairs: list[tuple[str, IndexedData | None, IndexedData | None]] = [
        ("dataset", data.training, job.script_data.training),
        ("validation dataset", data.validation, job.script_data.validation),
    ]
    for what, here, there in pairs:
        if (here is None) != (there is None):
            raise UsageError(
                f"run.dataset() got a {what} either here or in the driver, but not in both; pass the same on every node"
            )
        if here and there and (difference := here.difference(there)):
            raise UsageError(
                f"run.dataset() got a {what} with {difference}, which the driver got; give all nodes the same data; if only the "
                "fingerprint is another one in every process, set data.name in the job's YAML"
            )


def validation_plan(job: Job, num_rows: int) -> Plan:
    """Return the plan of a validation on `num_rows` samples.

    It takes each sample once, in stored order, in full steps except where the data end.
    """
    steps = -(-min(job.validation.samples or num_rows, num_rows) // job.plan.global_batch)
    spec = replace(job.plan, shuffle="none", last_step="short", epochs=1, max_steps=steps)
    assert isinstance(spec, PlanSpec)
    return Plan(spec, num_rows)
