"""Datasets of a script, whose samples are read by index: their length, and the identity by which a run knows its dataset again."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from json import dumps
from typing import Any

from undula.errors import SpecError
from undula.plan.plan import PlanSpec


@dataclass(frozen=True)
class IndexedData:
    """Length and identity of a dataset whose samples are read by index. Sample ids are indices."""

    num_rows: int
    """Number of samples."""
    name: str
    """Fingerprint of the content, or the name that the script gives it; empty if neither is known."""

    @property
    def is_checked(self) -> bool:
        """Whether other content of the same length would be noticed."""
        return bool(self.name)

    @property
    def digest(self) -> str:
        """SHA-256 digest of the length and the name, in hexadecimal."""
        return sha256(dumps(["indexed", self.num_rows, self.name]).encode()).hexdigest()

    def check_plan(self, spec: PlanSpec) -> None:
        """Check that a plan can order the samples.

        Raises:
            SpecError: The plan permutes row groups only.
        """
        if spec.shuffle == "row_groups":
            raise SpecError(
                "plan.shuffle=row_groups needs row groups, which the dataset of run.dataset() does not have; set plan.shuffle=window, "
                "which permutes all of its samples, or none"
            )

    def difference(self, before: "IndexedData") -> str | None:
        """Return how this dataset differs from the one that it should be, as in "900 samples instead of 1000"; None if it does not."""
        if self.num_rows != before.num_rows:
            return f"{self.num_rows} samples instead of {before.num_rows}"
        if self.name != before.name:
            return f"the fingerprint or name {self.name!r} instead of {before.name!r}"
        return None


@dataclass(frozen=True)
class ScriptData:
    """Data that the script gives to the run, instead of data that the job's YAML names."""

    training: IndexedData
    validation: IndexedData | None = None
    """Validation data; None if the run does not validate."""
    num_workers: int = 0
    """Number of loader processes of each rank for each of the two."""

    def as_record(self) -> dict[str, Any]:
        """Return the training data as plain values, for `recorded_data`."""
        return asdict(self.training)


def recorded_data(record: Mapping[str, Any]) -> IndexedData:
    """Return the data of a record of `ScriptData.as_record`.

    Raises:
        KeyError, TypeError, ValueError: The record is damaged.
    """
    return IndexedData(int(record["num_rows"]), str(record["name"]))
