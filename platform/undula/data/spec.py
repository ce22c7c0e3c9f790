"""The part of a job's spec that says what it reads."""

from typing import Annotated

from annotated_types import Ge, Gt, Le, MinLen
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.plan.plan import STRICT

Url = Annotated[str, MinLen(1)]


@checked_dataclass(frozen=True, config=STRICT)
class CacheSpec:
    """A disk cache on each node of what is read from S3, shared by its workers and jobs; checked by ETag."""

    folder: Annotated[str, MinLen(1)]
    """Folder on each node, on its fastest disk."""
    max_gib: Annotated[float, Gt(0)]
    """Size at which what was least recently used goes."""


@checked_dataclass(frozen=True, config=STRICT)
class MixPart:
    """One data set of a mix."""

    url: Url
    """Path or s3:// URL, as for `train`."""
    weight: Annotated[float, Gt(0), Le(1e9)]
    """Its share of the samples, relative to the other weights."""


@checked_dataclass(frozen=True, config=STRICT)
class DataSpec:
    """What a job reads."""

    train: Url | None = None
    """Path or s3:// URL of the training data: a folder of Parquet with a manifest (`undula data index URL` makes one)."""
    mix: Annotated[tuple[MixPart, ...], MinLen(2)] | None = None
    """Several data sets in place of `train`: a list of `url` and `weight`. Each is gone through at its own pace, round after round; an
    epoch of the plan is as many samples as they have together."""
    validation: Url | None = None
    """The same for the validation data; without it the job does not validate."""
    columns: tuple[str, ...] | None = None
    """Columns to read; by default all."""
    cache: CacheSpec | None = None
    """Disk cache of what is read from S3, for later epochs and resumes: `folder` and `max_gib`. Without it nothing is kept."""
    head_mib: Annotated[int, Ge(0)] = 32
    """MiB that a worker reads by itself at the start of an epoch or after a resume, while Ray Data's tasks start; a smaller share of
    the data than that needs no tasks."""
    read_tasks: Annotated[int, Gt(0)] = 2
    """Read tasks of Ray Data that a worker keeps running ahead of its training."""
    prefetch_mib: Annotated[int, Gt(0)] = 512
    """MiB of rows that Ray Data holds ahead of a worker, beside the shuffle windows in use; no less than its read tasks bring at once."""
    read_cpus: Annotated[float, Ge(0)] = 0.0
    """CPUs that Ray reserves for a read task. With 0 a small cluster whose CPUs are all held by workers cannot starve it."""

    def __post_init__(self) -> None:
        if (self.train is None) == (self.mix is None):
            raise ValueError("train or data.mix must be given, and not both: one data set, or several with weights")
        urls = [part.url.rstrip("/") for part in self.mix or ()]
        if twice := next((url for url in urls if urls.count(url) > 1), None):
            raise ValueError(f"mix names {twice} twice: give it once, with the sum of the weights")
