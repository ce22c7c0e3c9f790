"""Specification of a job's data."""

from typing import Annotated

from annotated_types import Ge, Gt, Le, MinLen
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.errors import STRICT

Url = Annotated[str, MinLen(1)]


@checked_dataclass(frozen=True, config=STRICT)
class CacheSpec:
    """Disk cache on each node for data from S3. All workers and jobs of a node share it; entries are checked by ETag."""

    folder: Annotated[str, MinLen(1)]
    """Folder of the cache on each node, preferably on its fastest disk."""
    max_gib: Annotated[float, Gt(0)]
    """Maximum size of the cache in GiB; beyond it, the least recently used data are evicted."""


@checked_dataclass(frozen=True, config=STRICT)
class MixPart:
    """One data set of a mix."""

    url: Url
    """Path or s3:// URL of the data set, as for `train`."""
    weight: Annotated[float, Gt(0), Le(1e9)]
    """Share of the samples that come from this data set, relative to the other weights."""


@checked_dataclass(frozen=True, config=STRICT)
class DataSpec:
    """Data of a job and how to read them."""

    train: Url | None = None
    """Path or s3:// URL of the training data: a folder of Parquet files with a manifest, which `undula data index URL` creates. If `train`
    and `mix` are missing, the script gives its own dataset to `run.dataset()`."""
    mix: Annotated[tuple[MixPart, ...], MinLen(2)] | None = None
    """Several data sets to mix instead of `train`: a list of `url` and `weight`. Each data set is repeated at its own pace, and an epoch of
    the plan has as many samples as all data sets together."""
    validation: Url | None = None
    """Path or s3:// URL of the validation data; without it, the job does not validate."""
    name: Annotated[str, MinLen(1)] | None = None
    """Name of the dataset that the script gives to `run.dataset()` or to the trainer of its library. Change it whenever the content
    changes: a run resumes only with data of the same name and length. By default, the fingerprint of a `Dataset` of Hugging Face."""
    columns: tuple[str, ...] | None = None
    """Columns to read; by default all columns."""
    cache: CacheSpec | None = None
    """Disk cache for data from S3 that later epochs and resumes use: `folder` and `max_gib`. By default nothing is cached."""
    head_mib: Annotated[int, Ge(0)] = 32
    """Amount of decoded data in MiB that a worker reads itself after a start or resume, while Ray Data's tasks start. A worker whose share
    of the data is smaller starts no tasks."""
    read_tasks: Annotated[int, Ge(0)] = 2
    """Maximum number of Ray Data read tasks that run concurrently for each worker. Fewer run if their decoded row groups would take more
    than half of `prefetch_mib`. With 0, a thread of the worker reads all data."""
    prefetch_mib: Annotated[int, Gt(0)] = 512
    """Maximum amount of decoded rows in MiB that Ray Data reads ahead of a worker, in addition to the shuffle windows in use. Only a
    single row group that is larger than half of it can exceed it."""
    read_cpus: Annotated[float, Ge(0)] = 0.0
    """Number of CPUs that Ray reserves for a read task. With 0, read tasks run on the worker's node, also if workers hold all CPUs.
    Otherwise, they run on any node that has the CPUs left, and a worker that has waited 5 s for them reads the rows itself."""

    @property
    def is_of_script(self) -> bool:
        """Whether the script gives the data to `run.dataset()`."""
        return self.train is None and self.mix is None

    def __post_init__(self) -> None:
        if self.train is not None and self.mix is not None:
            raise ValueError("train and data.mix are both set; set one of them")
        if self.is_of_script:
            self._refuse_keys_of_stored_data()
        elif self.name is not None:
            raise ValueError(
                "name is for a dataset of the script, but data.train or data.mix is set; remove one of them"
            )
        urls = [part.url.rstrip("/") for part in self.mix or ()]
        if twice := next((url for url in urls if urls.count(url) > 1), None):
            raise ValueError(f"mix lists {twice} twice; list it once, with the sum of the weights")

    def _refuse_keys_of_stored_data(self) -> None:
        for key in ("validation", "columns", "cache"):
            if getattr(self, key) is not None:
                raise ValueError(
                    f"{key} is set, but data.train and data.mix are missing; set one of them, or remove data.{key} if the script calls "
                    "run.dataset()"
                )


@checked_dataclass(frozen=True, config=STRICT)
class ValidationSpec:
    """When and on how much the job validates."""

    every_steps: Annotated[int, Gt(0)] = 100
    """Steps between validations; one more is made before the first step and after the last."""
    samples: Annotated[int, Gt(0)] | None = None
    """Samples of a validation, rounded up to whole steps and spread over the validation data; by default all."""
