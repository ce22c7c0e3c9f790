"""Tests of jobs whose script gives its own dataset, which the driver looks at before any worker starts."""

import argparse
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawn_data import ROWS, Drawn, DrawnAtOnce
from numbers_job import write_numbers
from torch import nn
from torch.utils.data import IterableDataset

from undula.config.job import LoadedSpec, load_spec
from undula.data.script.indexed import IndexedData, ScriptData
from undula.driver.preflight import prepare
from undula.driver.record import record_job
from undula.errors import RunError, UndulaError, UsageError
from undula.plan.plan import Plan
from undula.report.data.certificate import certify, data_of
from undula.report.data.run_record import read_run
from undula.state.directory import JOB_FILE
from undula.train.run import Run


def job(folder: Path, *overrides: str) -> LoadedSpec:
    file = folder / "job.yaml"
    file.write_text(json.dumps({"name": "run", "runs": str(folder)}))
    return load_spec(file, ["plan.global_batch=12", *overrides])


def trains_on(dataset: Any, **arguments: Any) -> Callable[[Run], None]:
    def train(run: Run) -> None:
        run.dataset(dataset, **arguments)
        run.model(nn.Linear(2, run.plan.num_rows))

    return train


class Stream(IterableDataset[int]):
    """Dataset without indices."""

    def __iter__(self) -> Any:
        return iter([1])


def test_the_driver_knows_the_length_and_the_identity_of_the_scripts_dataset(tmp_path: Path) -> None:
    prepared = prepare(job(tmp_path), trains_on(DrawnAtOnce(), validation=Drawn(30), num_workers=2), fresh=False)
    assert prepared.plan == Plan(job(tmp_path).spec.plan, ROWS)
    assert prepared.script_data == ScriptData(IndexedData(ROWS, "5c4f2a"), IndexedData(30, ""), num_workers=2)
    spec = record_job(job(tmp_path), prepared.plan, prepared.store, prepared.script_data)
    assert spec.job.script_data == prepared.script_data
    record = json.loads(prepared.store.read(JOB_FILE))
    assert (record["train_rows"], record["dataset"]) == (ROWS, {"num_rows": ROWS, "name": "5c4f2a"})
    assert record["manifest_digest"] == IndexedData(ROWS, "5c4f2a").digest
    assert data_of(read_run(prepared.store)) == IndexedData(ROWS, "5c4f2a")


def reads_its_rank(run: Run) -> None:
    int(os.environ["RANK"])


def makes_a_group(run: Run) -> None:
    dist.init_process_group("gloo")


def parses(run: Run) -> None:
    argparse.ArgumentParser().parse_args(["--lr", "0.1"])


@pytest.mark.parametrize(
    ("train", "reason"),
    [
        (reads_its_rank, "the script reads the environment variable RANK, which launchers"),
        (
            makes_a_group,
            "the script calls torch.distributed.init_process_group(), but a run makes its process group itself",
        ),
        (parses, "the script parses a command line"),
    ],
)
@pytest.mark.parametrize("stored", [False, True])
def test_what_a_launchers_script_does_in_its_train_function_is_refused_with_its_line(
    tmp_path: Path, train: Callable[[Run], None], reason: str, stored: bool
) -> None:
    write_numbers(tmp_path, 24)
    data = [f"data.train={tmp_path / 'data'}"] if stored else []
    with pytest.raises(UsageError, match=f"^{re.escape(reason)}") as caught:
        prepare(job(tmp_path, *data), train, fresh=True)
    assert re.search(rf"\({Path(__file__).name}:{train.__code__.co_firstlineno + 1}\)$", str(caught.value))


def test_the_dataset_is_made_on_the_cpu_and_the_model_without_memory(tmp_path: Path) -> None:
    devices = []

    def train(run: Run) -> None:
        devices.append(torch.ones(1).device.type)
        run.dataset(Drawn())
        module = nn.Linear(2, 3)
        devices.append(module.weight.device.type)
        run.model(module)

    prepare(job(tmp_path), train, fresh=False)
    assert devices == ["cpu", "meta"]


def test_the_certificate_says_whether_the_content_was_checked(tmp_path: Path) -> None:
    for dataset, is_checked in ((Drawn(), False), (DrawnAtOnce(), True)):
        prepared = prepare(job(tmp_path), trains_on(dataset), fresh=True)
        record_job(job(tmp_path), prepared.plan, prepared.store, prepared.script_data)
        run = read_run(prepared.store)
        sentences = [
            sentence
            for sentence in certify(run, data_of(run)).not_proved
            if "the dataset has no fingerprint" in sentence
        ]
        assert len(sentences) == (not is_checked)


def without_dataset(run: Run) -> None:
    run.model(nn.Linear(2, 3))


def ends_early(run: Run) -> None:
    """Train function that returns before it does anything."""


def reads_the_plan(run: Run) -> None:
    without_dataset(run) if run.plan else None


def maps(run: Run) -> None:
    run.dataset(Drawn())
    run.map(lambda sample, rng: sample)


def fails(run: Run) -> None:
    raise FileNotFoundError("no such folder: /data")


@pytest.mark.parametrize(
    ("train", "overrides", "sentence"),
    [
        (without_dataset, (), "data.train and data.mix are missing, and the script does not call run.dataset() before run.model()"),
        (ends_early, (), "data.train and data.mix are missing, and the script does not call run.dataset() before run.model()"),
        (reads_the_plan, (), "run.plan was read before run.dataset(), which makes it; call run.dataset() first"),
        (maps, (), "run.map() transforms rows of Parquet files, but this run reads the dataset of run.dataset()"),
        (fails, (), "the script failed with FileNotFoundError: no such folder: /data before run.dataset()"),
        (trains_on(Stream()), (), "run.dataset() got an IterableDataset, whose samples have no index"),
        (trains_on(Drawn(), batch_sampler=[[1]]), (), "run.dataset() does not take batch_sampler=; the plan decides"),
        (trains_on(Drawn(3)), (), "plan.virtual_workers is 4, more than the 3 samples of the data"),
        (trains_on(Drawn(), validation=Drawn(3)), (), "plan.virtual_workers is 4, more than the 3 samples of the data"),
        (trains_on(Drawn()), ("plan.shuffle=row_groups",), "plan.shuffle=row_groups needs row groups"),
        (trains_on(Drawn()), ("stop.patience=2",), "stop needs validations, but the script gives no validation data"),
    ],
)  # fmt: skip
def test_what_a_run_cannot_use_is_refused_before_a_worker_starts(
    tmp_path: Path, train: Callable[[Run], None], overrides: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(UndulaError) as caught:
        prepare(job(tmp_path, *overrides), train, fresh=False)
    assert sentence in str(caught.value)


def test_data_of_the_script_and_of_the_yaml_exclude_each_other(tmp_path: Path) -> None:
    write_numbers(tmp_path, 48)
    with pytest.raises(UsageError, match=r"run\.dataset\(\) was called, but command line has data\.train; remove"):
        prepare(job(tmp_path, f"data.train={tmp_path}/data"), trains_on(Drawn()), fresh=False)


@pytest.mark.parametrize(
    ("dataset", "name", "sentence"),
    [
        (Drawn(90), None, r"got a dataset with 90 samples instead of 103, with which .*/run was started; restore it"),
        (DrawnAtOnce(), None, r"got a dataset with the fingerprint or name '5c4f2a' instead of '', with which"),
        (Drawn(), "v2", r"got a dataset with the fingerprint or name 'v2' instead of '', with which"),
    ],
)
def test_a_dataset_that_changed_since_the_run_began_is_refused(
    tmp_path: Path, dataset: Any, name: str | None, sentence: str
) -> None:
    prepared = prepare(job(tmp_path), trains_on(Drawn()), fresh=False)
    record_job(job(tmp_path), prepared.plan, prepared.store, prepared.script_data)
    prepared.store.write("ledger/steps-000001-00000.parquet", b"")
    prepare(job(tmp_path), trains_on(Drawn()), fresh=False)
    with pytest.raises(RunError, match=sentence):
        prepare(job(tmp_path), trains_on(dataset, name=name), fresh=False)
    prepare(job(tmp_path), trains_on(dataset, name=name), fresh=True)


def test_a_run_does_not_change_from_stored_data_to_a_dataset(tmp_path: Path) -> None:
    write_numbers(tmp_path, 48)
    stored = job(tmp_path, f"data.train={tmp_path}/data")
    prepared = prepare(stored, without_dataset, fresh=False)
    record_job(stored, prepared.plan, prepared.store)
    prepared.store.write("ledger/steps-000001-00000.parquet", b"")
    with pytest.raises(RunError, match="was started with other training data than the script has now"):
        prepare(job(tmp_path), trains_on(Drawn()), fresh=False)
