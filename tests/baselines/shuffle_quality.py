"""Quality of the shuffles: 1,000,000 rows in 1000 row groups, 8 virtual workers, global batch 256, one epoch.

    python -m tests.baselines.shuffle_quality

Beside a perfect permutation of all rows, whose figures are the aim.
"""

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from undula.plan.keys import Ids
from undula.plan.order import EpochOrder
from undula.plan.plan import Plan, PlanSpec

ROWS, ROW_GROUPS, BATCH = 1_000_000, 1000, 256
SHUFFLES = {
    "none": {"shuffle": "none"},
    "row_groups": {"shuffle": "row_groups"},
    **{f"window, {size} row groups": {"shuffle": "window", "window": size} for size in (1, 2, 4, 16, 64)},
}


def epoch(**shuffle: object) -> Ids:
    """Return the ids in the order of consumption; shape [rows]."""
    spec = PlanSpec(global_batch=BATCH, virtual_workers=8, **shuffle)  # type: ignore[arg-type]
    order = EpochOrder(Plan(spec, ROWS), np.full(ROW_GROUPS, ROWS // ROW_GROUPS), 0)
    return np.concatenate([order.step_ids(step) for step in range(order.plan.steps_per_epoch)])


def figures(ids: NDArray[np.int64]) -> list[str]:
    groups = ids // (ROWS // ROW_GROUPS)
    full = groups[: len(groups) // BATCH * BATCH].reshape(-1, BATCH)
    return [
        f"{np.corrcoef(ids[:-1], ids[1:])[0, 1]:.3f}",
        f"{np.mean(np.diff(ids) == 1):.2%}",
        f"{np.mean(np.abs(ids - np.arange(ROWS))) / ROWS:.3f}",
        f"{np.mean([len(np.unique(batch)) for batch in full[:200]]):.0f}",
    ]


def main() -> None:
    table = Table(
        "shuffle", "correlation of neighbours", "neighbours as stored", "distance moved / rows", "row groups in a batch"
    )
    for name, settings in SHUFFLES.items():
        table.add_row(name, *figures(epoch(**settings)))
    table.add_row("perfect", *figures(np.random.default_rng(0).permutation(ROWS)))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
