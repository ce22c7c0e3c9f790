"""Tests of preflight, which refuses jobs that would fail in a worker. They use no Ray and no worker."""

import json
import shutil
from pathlib import Path

import pytest
from data_sets import write_table
from numbers_job import write_numbers
from torch import nn

from undula.config.job import LoadedSpec, load_spec
from undula.data.stored.manifest import load_manifest
from undula.driver import preflight
from undula.driver.preflight import check_job, check_model, examine, on_machines, prepare
from undula.driver.record import record_job
from undula.errors import CheckpointError, ManifestError, RunError, SpecError, SupersededError
from undula.plan.plan import Plan
from undula.state.commit import Commit
from undula.state.directory import JOB_FILE, require_newest_submission
from undula.state.model_state import MODEL
from undula.storage import open_store
from undula.train.run import Run


def job(folder: Path, *overrides: str) -> LoadedSpec:
    file = folder / "job.yaml"
    if not file.exists():
        write_numbers(folder, 48)
        file.write_text(json.dumps({"name": "run", "runs": str(folder), "data": {"train": str(folder / "data")}}))
    return load_spec(file, ["plan.global_batch=12", *overrides])


def train(run: Run) -> None:
    run.model(nn.Linear(2, 3))


def test_a_record_describes_the_job_and_a_resumed_run_keeps_its_identity(tmp_path: Path) -> None:
    loaded = job(tmp_path)
    prepared = prepare(loaded, train, fresh=False)
    assert not prepared.is_finished
    first = record_job(loaded, prepared.plan, prepared.store)
    record = json.loads(prepared.store.read(JOB_FILE))
    assert (record["id"], record["began"]) == (first.job.run_id, first.work.began)
    assert (record["name"], record["train_rows"], record["total_steps"]) == ("run", 48, prepared.plan.total_steps)
    assert record["spec"] == loaded.tree()

    again = record_job(job(tmp_path, "workers.hang_limit_s=9"), prepared.plan, prepared.store)
    assert (again.job.run_id, again.work) == (first.job.run_id, first.work)
    require_newest_submission(prepared.store, again.job.submission)
    with pytest.raises(SupersededError):
        require_newest_submission(prepared.store, first.job.submission)
    assert json.loads(prepared.store.read(JOB_FILE))["spec"]["workers"]["hang_limit_s"] == 9


def test_a_run_continues_with_a_copy_of_its_data(tmp_path: Path) -> None:
    loaded = job(tmp_path)
    first = record_job(loaded, prepare(loaded, train, fresh=False).plan, open_store(str(tmp_path / "run")))
    shutil.copytree(tmp_path / "data", tmp_path / "copy", copy_function=shutil.copyfile)
    moved = job(tmp_path, f"data.train={tmp_path}/copy")
    prepared = prepare(moved, train, fresh=False)
    assert record_job(moved, prepared.plan, prepared.store).job.run_id == first.job.run_id
    versions = [[file.version for file in load_manifest(str(tmp_path / name)).files] for name in ("data", "copy")]
    assert versions[0] != versions[1]


def test_the_record_has_the_number_of_gpus_that_auto_stands_for(tmp_path: Path) -> None:
    loaded = job(tmp_path)
    prepared = prepare(loaded, train, fresh=False)
    for offers in (True, False):
        spec = record_job(on_machines(loaded, lambda offers=offers: offers), prepared.plan, prepared.store)
        assert spec.workers.gpus == float(offers)
        assert json.loads(prepared.store.read(JOB_FILE))["spec"]["workers"]["gpus"] == float(offers)
    assert on_machines(job(tmp_path, "workers.gpus=2"), lambda: False).spec.workers.gpus == 2


def test_a_format_that_the_cpu_lacks_is_refused_as_soon_as_the_workers_get_no_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "cpu_problem", lambda compute: f"this CPU cannot train in {compute}; use fp32")
    loaded = job(tmp_path, "precision.compute=fp16")
    prepare(loaded, train, fresh=False)  # the cluster may have GPUs
    prepare(job(tmp_path, "precision.compute=fp16", "workers.gpus=1"), train, fresh=False)
    for check in (
        lambda: on_machines(loaded, lambda: False),
        lambda: prepare(job(tmp_path, "precision.compute=fp16", "workers.gpus=0"), train, False),
    ):
        with pytest.raises(SpecError, match=r"^command line: this CPU cannot train in fp16; use fp32$"):
            check()


def test_shards_in_host_memory_are_refused_as_soon_as_the_workers_get_no_gpus(tmp_path: Path) -> None:
    settings = ("sharding.stage=3", "sharding.offload=all")
    loaded = job(tmp_path, *settings)
    prepare(loaded, train, fresh=False)  # the cluster may have GPUs
    assert on_machines(loaded, lambda: True).spec.sharding.offload == "all"
    for check in (
        lambda: on_machines(loaded, lambda: False),
        lambda: prepare(job(tmp_path, *settings, "workers.gpus=0"), train, False),
    ):
        with pytest.raises(SpecError, match=r"^command line: sharding\.offload=all has no effect without GPUs; remove"):
            check()


def test_16_bit_parameters_in_a_16_bit_run_are_refused_with_the_reason(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        run.model(nn.Linear(2, 3).bfloat16())

    prepare(job(tmp_path), train, fresh=False)
    for compute in ("bf16", "fp16"):
        with pytest.raises(
            SpecError, match=rf"parameters cannot be combined with precision.compute={compute}, because"
        ):
            prepare(job(tmp_path, f"precision.compute={compute}"), train, fresh=False)


def test_a_run_of_a_version_without_precisions_resumes_in_fp32_only(tmp_path: Path) -> None:
    loaded = job(tmp_path)
    prepared = prepare(loaded, train, fresh=False)
    first = record_job(loaded, prepared.plan, prepared.store).job.run_id
    record = json.loads(prepared.store.read(JOB_FILE))
    del record["spec"]["precision"]
    prepared.store.write(JOB_FILE, json.dumps(record).encode())
    prepared.store.write("ledger/steps-000001-00000.parquet", b"")
    prepare(loaded, train, fresh=False)
    assert record_job(loaded, prepared.plan, prepared.store).job.run_id == first
    with pytest.raises(RunError, match=r'precision.compute is "bf16", but .*/run was started with "fp32"; restore it'):
        prepare(job(tmp_path, "precision.compute=bf16"), train, fresh=False)


def test_horovod_without_nccl_is_refused_as_soon_as_the_workers_get_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr("undula.elastic.ray.horovod.check", asked.append)
    loaded = job(tmp_path, "engine=horovod")
    prepare(loaded, train, fresh=False)
    on_machines(loaded, lambda: True)
    prepare(job(tmp_path, "engine=horovod", "workers.gpus=1"), train, fresh=False)
    assert asked == [False, True, True]


def test_only_the_horovod_engine_gets_horovods_settings(tmp_path: Path) -> None:
    store, plan = open_store(str(tmp_path / "run")), Plan(job(tmp_path).spec.plan, 48)
    assert record_job(job(tmp_path), plan, store).engine_settings is None
    spec = record_job(job(tmp_path, "engine=horovod", "horovod.timeout_s=7"), plan, store)
    assert spec.engine_settings.timeout_s == 7


def test_only_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    loaded = job(tmp_path)
    model = examine(train, loaded, check_job(loaded)).model

    def commit(**shapes: tuple[int, ...]) -> Commit:
        tensors = {MODEL + name: {"shape": shape} for name, shape in shapes.items()}
        return Commit("checkpoints/step-1-a1", 1, "", tensors, [], {}, {})

    check_model(model, loaded, commit(weight=(3, 2), bias=(3,)))
    with pytest.raises(CheckpointError, match=r"'weight' has shape \(3, 4\), but the model's has shape \(3, 2\)"):
        check_model(model, loaded, commit(weight=(3, 4), bias=(3,)))


def test_a_run_without_a_checkpoint_resumes_with_the_same_settings_only(tmp_path: Path) -> None:
    loaded = job(tmp_path)
    prepared = prepare(loaded, train, fresh=False)
    first = record_job(loaded, prepared.plan, prepared.store).job.run_id
    changed = job(tmp_path, "schedule.base_lr=0.5")
    prepare(changed, train, fresh=False)
    # Nothing has been trained yet. With another id, the run does not find snapshots that were taken with the first settings.
    other = record_job(changed, prepared.plan, prepared.store).job.run_id
    assert other != first
    prepared.store.write("ledger/steps-000001-00000.parquet", b"")
    assert record_job(changed, prepared.plan, prepared.store).job.run_id == other
    prepare(changed, train, fresh=False)
    prepare(loaded, train, fresh=True)
    with pytest.raises(RunError, match=r"schedule.base_lr is .* but .*/run was started with 0.5; restore it"):
        prepare(loaded, train, fresh=False)


def test_validation_data_with_other_columns_are_refused_with_the_first_difference(tmp_path: Path) -> None:
    write_table(tmp_path / "other", {"x": [1.5] * 48})
    with pytest.raises(
        ManifestError, match=r"/other has other columns than .*/data: column 'x' is double and not float;"
    ):
        prepare(job(tmp_path, f"data.validation={tmp_path}/other"), train, fresh=False)


def test_validation_data_may_be_smaller_than_a_step(tmp_path: Path) -> None:
    job(tmp_path)
    write_numbers(tmp_path / "small", 7)
    prepare(job(tmp_path, "plan.last_step=drop", f"data.validation={tmp_path}/small/data"), train, fresh=False)
    with pytest.raises(
        SpecError, match=r"data\.validation: plan\.virtual_workers is 12, more than the 7 samples of the data"
    ):
        prepare(job(tmp_path, "plan.virtual_workers=12", f"data.validation={tmp_path}/small/data"), train, fresh=False)


def test_a_model_that_no_engine_can_train_with_the_settings_is_refused(tmp_path: Path) -> None:
    def sparse(run: Run) -> None:
        run.model(nn.Embedding(4, 2, sparse=True))

    with pytest.raises(
        SpecError, match=r"a model with sparse gradients .* cannot be combined with gradient\.reduce=adasum"
    ):
        prepare(job(tmp_path, "gradient.reduce=adasum"), sparse, fresh=False)


def test_the_directory_of_a_study_is_refused_for_a_run(tmp_path: Path) -> None:
    open_store(str(tmp_path / "run")).write("study.json", b"{}")
    with pytest.raises(RunError, match="/run is a study's directory; give the run another name"):
        prepare(job(tmp_path), train, fresh=False)


def test_units_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    loaded = job(tmp_path, "activations.keep=none", "activations.units=[encoder.*]")
    with pytest.raises(SpecError, match=r"activations\.units has 'encoder\.\*', which matches no module of the model"):
        prepare(loaded, train, fresh=False)
