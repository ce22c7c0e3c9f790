"""What a run needs of a library that reduces gradients in place of torch.distributed, which a job names with `engine`."""

from collections.abc import Callable
from typing import Any, Protocol

from undula import extensions
from undula.parallel.collectives import AllRows
from undula.parallel.layout import Layout
from undula.parallel.reduce.exchange import Exchange
from undula.parallel.spec import LIBRARIES, OWN_LIBRARIES


class ReducingLibrary(Protocol):
    """What a run needs of a library. Torch's process groups exist beside it, for the decisions of the ranks."""

    def check(self, has_gpus: bool) -> None:
        """Check, before workers start, that the library is installed and can train the job.

        Args:
            has_gpus: Whether the workers use GPUs.

        Raises:
            ClusterError: It is not, or cannot.
        """

    def trainer(self, train_loop_per_worker: Callable[[], Any], settings: Any, timeout_s: int, **arguments: Any) -> Any:
        """Return the `ElasticTrainer` that starts the library in each group of workers.

        Args:
            train_loop_per_worker: Train function.
            settings: Section of the job that has the name of the library; None if there is none.
            timeout_s: Maximum seconds for which a rank waits for others in a collective.
            arguments: Arguments of `ElasticTrainer`.
        """

    def exchange(self, layout: Layout, virtual_workers: int) -> Exchange:
        """Return the exchange of the roots of all ranks, in a worker."""

    def all_rows(self, layout: Layout) -> AllRows:
        """Return the function that gathers the rows of all ranks, in a worker."""


def library_named(engine: str) -> ReducingLibrary | None:
    """Return the library that a job names with `engine`; None for torch itself.

    Raises:
        SpecError: It cannot be imported.
    """
    library: ReducingLibrary | None = None if engine == "torch" else extensions.load(LIBRARIES, OWN_LIBRARIES, engine)
    return library
