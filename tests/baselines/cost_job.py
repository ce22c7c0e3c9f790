"""The main job. Rank 0 writes the times of its steps to $UNDULA_BENCH_OUT; with $UNDULA_BENCH_SILENT, it writes no ledger."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import language_model
import undula
from undula.train import run as loop


class Silent:
    """Telemetry that reports nothing."""

    stored_steps = 2**40

    def __init__(self, *arguments: Any): ...

    def step(self, row: Any) -> None: ...

    def repeat(self, rows: Any) -> None: ...

    def event(self, event: Any) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def train(run: undula.Run) -> None:
    if "UNDULA_BENCH_SILENT" in os.environ:
        loop.Telemetry = Silent  # type: ignore[assignment, misc]
    steps, times = run.steps, []

    def timed(*arguments: Any, **more: Any) -> Iterator[undula.Step]:
        for step in steps(*arguments, **more):
            times.append(time.time())
            yield step

    run.steps = timed  # type: ignore[method-assign]
    language_model.train(run)
    if run.rank == 0:
        Path(os.environ["UNDULA_BENCH_OUT"]).write_text(json.dumps(times))


if __name__ == "__main__":
    undula.main(train, config=language_model.Config)
