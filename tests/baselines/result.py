"""Output of the benchmarks: a table on the terminal, and build/bench/NAME.json."""

import json
import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).parents[2] / "build" / "bench"


def print_and_write(name: str, rounds: list[dict[str, float]]) -> None:
    """Write the median and spread of each figure over the rounds to the terminal and to build/bench/NAME.json."""
    figures = {
        key: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for key in rounds[0]
        for values in [[each[key] for each in rounds]]
    }
    table = Table("figure", "median", "min", "max", title=f"{name}: {len(rounds)} rounds")
    for key, figure in figures.items():
        table.add_row(key, *(f"{figure[part]:.3f}" for part in ("median", "min", "max")))
    Console().print(table)
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps({"rounds": rounds, "figures": figures}, indent=1))
    print(f"written to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
