"""Tests of the check before a worker starts, for sharded models."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from jobs_kit import LANGUAGE_MODEL

from undula.config.job import load_spec
from undula.driver import estimate
from undula.driver.estimate import estimating
from undula.elastic.ray.gpu_memory import NodeGpu
from undula.errors import SpecError
from undula.plan.gpus import GIB
from undula.plan.memory import PassCount, SplitTensor, StateCount, UnitCount
from undula.plan.work import Work
from undula.train.dry_run.counting import Count, Setting

UNITS = (UnitCount(()), *[UnitCount((SplitTensor(1024, 2**20, trains=True, state_row_bytes=2**21),))] * 8)
"""Eight units of 1 GiB, with 2 GiB of the optimizer's state each."""
STATE = StateCount(0, 0, 8 * GIB, 0, 0, 8 * GIB, GIB, 16 * GIB, 0, 0, units=UNITS)
PASSES = PassCount(1, 0, 0, 0, 8 * GIB, 0, Work(1.0, 1.0, 1.0))


@contextmanager
def counting(
    script: object, job: object, settings: Sequence[Setting], *_: object, **__: object
) -> Iterator[Callable[[], Count]]:
    yield lambda: Count(STATE, dict.fromkeys(settings, PASSES), is_fake=True)


@pytest.fixture(autouse=True)
def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "counting", counting)
    monkeypatch.setattr(estimate, "smallest_gpu", lambda per_worker: NodeGpu("L4", 22 * GIB))
    monkeypatch.setattr(estimate.ScriptFile, "of_this_process", lambda: "a script")


def estimated(*overrides: str) -> float | None:
    """Return what a worker of the job needs, in GiB."""
    virtual = ("plan.virtual_workers=8", "plan.global_batch=8", "workers.max=8", "workers.gpus=1")
    with estimating(load_spec(LANGUAGE_MODEL.with_suffix(".yaml"), [*virtual, *overrides]), None) as result:
        event = result()
    return event and event.needed_bytes / GIB


def test_a_sharded_model_that_fits_among_more_workers_names_their_number() -> None:
    with pytest.raises(
        SpecError, match=r"L4 has 22\.0 GiB with workers\.min=1; set workers\.min=(\d), which needs"
    ) as raised:
        estimated("sharding.stage=3", "workers.min=1")
    workers = int(str(raised.value).split("set workers.min=")[1][0])
    fitting = estimated("sharding.stage=3", f"workers.min={workers}")
    assert fitting is not None
    assert fitting <= 22
    with pytest.raises(SpecError, match=rf"workers\.min={workers - 1}; set workers\.min={workers}, which needs"):
        estimated("sharding.stage=3", f"workers.min={workers - 1}")


def test_a_whole_model_that_does_not_fit_names_sharding() -> None:
    with pytest.raises(
        SpecError, match=r"micro_batch helps enough; set sharding\.stage=1 or higher, use GPUs with more"
    ):
        estimated()
    with pytest.raises(SpecError, match=r"micro_batch helps enough; use GPUs with more memory"):
        estimated("workers.max=1")
