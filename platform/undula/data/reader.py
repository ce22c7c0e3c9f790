"""Reader of samples: what training and validations take their micro-batches from, be they stored data or the script's own."""

from dataclasses import dataclass
from typing import Any, Protocol

from undula.plan.keys import Ids


@dataclass(frozen=True)
class Samples:
    """Ordered samples and their ids."""

    ids: Ids
    """Ids of the samples; shape [samples]."""
    batch: Any
    """Values of stored data by column name, or what the script's collate function has made of the samples."""


class SampleReader(Protocol):
    """Samples of a rank's virtual workers from a step on, in the order of the plan."""

    def open(self) -> None:
        """Start to read ahead, so that the first samples are ready when `take` is called."""

    def take(self, virtual_worker: int, count: int) -> Samples:
        """Return the next `count` samples of a virtual worker, which are one micro-batch of the plan."""

    def any_rows(self, count: int) -> Samples:
        """Return `count` arbitrary samples, some of them twice if need be, for a rank whose share of a short step is empty."""

    def close(self) -> None:
        """Stop reading ahead."""
