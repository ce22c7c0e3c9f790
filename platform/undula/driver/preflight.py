"""Checks of the driver before any worker starts: of the data, the run directory, the model, and the state from which a run resumes."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from undula.config.job import LoadedSpec, changed_key
from undula.data.planned import Data
from undula.data.prepare.index import renew_copy
from undula.data.script.indexed import IndexedData, ScriptData, recorded_data
from undula.data.stored.manifest import difference, load_manifest
from undula.data.stored.mixture import Mixture, StoredData, load_data
from undula.driver.model_facts import ModelFacts, script_facts
from undula.driver.trackers import checked_trackers
from undula.errors import ManifestError, RunError, SpecError, StorageError
from undula.parallel.capabilities import refusal
from undula.parallel.precision import cpu_problem
from undula.plan.plan import Plan, PlanSpec
from undula.state.commit import Commit, find_commits
from undula.state.directory import JOB_FILE, STUDY_FILE
from undula.state.events import EndEvent, FailEvent
from undula.state.ledger import decode_events, has_steps, read_ledger
from undula.state.model_state import check_shapes
from undula.storage import Store, open_store
from undula.telemetry.tracker import Tracker
from undula.train.run import Run


@dataclass(frozen=True)
class Prepared:
    """A job that passed all checks."""

    store: Store
    """The run directory."""
    plan: Plan
    is_finished: bool
    """Whether an undamaged checkpoint of the plan's last step exists."""
    script_data: ScriptData | None = None
    """Data that the script gives to the run; None if the job's YAML names the data."""
    trackers: tuple[Tracker, ...] = ()
    """Trackers of the job."""


@dataclass(frozen=True)
class Examined:
    """A job whose data and script fit each other."""

    data: Data
    """The training data."""
    plan: Plan
    script_data: ScriptData | None
    """Data that the script gives to the run; None if the job's YAML names the data."""
    model: ModelFacts | None
    """Facts about the script's model; None if they are not known."""


def prepare(loaded: LoadedSpec, train: Callable[[Run], None], fresh: bool) -> Prepared:
    """Check everything about a job that can be checked in the driver.

    Args:
        loaded: The job.
        train: Train function of the script.
        fresh: Whether the run starts over, in which case existing checkpoints are ignored.

    Raises:
        UndulaError: The first mistake that was found.
    """
    stored = check_job(loaded)
    store = _run_directory(loaded)
    trackers = checked_trackers(loaded, store)
    examined = examine(train, loaded, stored)
    plan = examined.plan
    newest = None if fresh else next(iter(find_commits(store)[0]), None)
    if newest is not None or (not fresh and has_steps(store)):
        _refuse_changes(store, loaded, examined.data)
    check_model(examined.model, loaded, newest)
    is_at_end = newest is not None and (
        newest.step >= plan.total_steps or bool(newest.results.reason_to_stop(loaded.spec.stop))
    )
    is_finished = (
        is_at_end and newest is not None and not newest.damage(store, sorted(newest.files)) and not _has_failed(store)
    )
    return Prepared(store, plan, is_finished, examined.script_data, trackers)


def _has_failed(store: Store) -> bool:
    """Return whether the script has failed in its work after the last step, which it then does again."""
    last = [event for event in decode_events(read_ledger(store).events) if isinstance(event, EndEvent | FailEvent)][-1:]
    return any(isinstance(event, FailEvent) for event in last)


def examine(train: Callable[[Run], None], loaded: LoadedSpec, stored: StoredData | None) -> Examined:
    """Run a train function up to its model, and check that a plan fits the data that it gives to the run.

    Args:
        train: Train function of the script.
        loaded: The job.
        stored: Data that the job's YAML names; None if the script gives them.

    Raises:
        UndulaError: The run cannot use the data, or settings of the job need validation data, which are missing.
    """
    facts = script_facts(train, loaded, stored.num_rows if stored else None)
    if stored:
        return Examined(stored, Plan(loaded.spec.plan, stored.num_rows), None, facts.model)
    assert facts.data is not None
    if facts.data.validation is None:
        no_data = "the script gives no validation data", "pass validation= to run.dataset()"
        if problem := loaded.spec.problem_without_validation(*no_data):
            raise SpecError(problem)
    else:
        Plan(replace(loaded.spec.plan, last_step="short"), facts.data.validation.num_rows)
    return Examined(facts.data.training, Plan(loaded.spec.plan, facts.data.training.num_rows), facts.data, facts.model)


def check_job(loaded: LoadedSpec) -> StoredData | None:
    """Check that the engine is installed, that a job without GPUs has settings for CPUs, that paths remain valid when the
    job has ended, and that the data can be read.

    Returns:
        The training data; None if the script gives them.

    Raises:
        UndulaError: The first mistake that was found.
    """
    if loaded.spec.engine == "horovod":
        _check_horovod(loaded, has_gpus=loaded.spec.workers.gpus not in ("auto", 0))
    if loaded.spec.workers.gpus == 0:
        _refuse_on_cpu(loaded)
    _refuse_lost_path("runs", loaded.spec.runs, loaded)
    if loaded.spec.data.is_of_script:
        return None
    data, spec = _training_data(loaded), loaded.spec.data
    if spec.validation is not None:
        url = spec.validation
        all_samples = replace(
            loaded.spec.plan, last_step="short"
        )  # a validation uses each sample, whatever training does
        validation = _checked("data.validation", [url], loaded, all_samples, lambda: load_manifest(url))
        if text := difference(validation.select(spec.columns), data.select(spec.columns)):
            raise ManifestError(
                f"{url} has other columns than {data.url}: {text}; give validation data with the schema of the training data"
            )
    return data


def on_machines(loaded: LoadedSpec, have_gpus: Callable[[], bool]) -> LoadedSpec:
    """Return the job with numbers in place of the values that depend on the machines that train it.

    Args:
        loaded: The job.
        have_gpus: Callback that returns whether these machines have GPUs. It is called if the number of GPUs depends on that.

    Raises:
        ClusterError: The workers get GPUs, and the installed Horovod cannot use them.
        SpecError: The workers get no GPUs, and the job's settings need them.
    """
    spec = loaded.spec
    if spec.workers.gpus != "auto":
        return loaded
    workers = spec.workers.on_cluster(have_gpus())
    if spec.engine == "horovod":
        _check_horovod(loaded, has_gpus=bool(workers.gpus))
    if not workers.gpus:
        _refuse_on_cpu(loaded)
    return loaded.with_workers(workers)


def check_model(facts: ModelFacts | None, loaded: LoadedSpec, newest: Commit | None) -> None:
    """Check that the job's settings can train the script's model, and that the newest checkpoint is of that model.

    Args:
        facts: Facts about the model; None if they are not known, in which case the workers check it.
        loaded: The job.
        newest: The newest checkpoint; None if there is none.

    Raises:
        UndulaError: The first mistake that was found.
    """
    if facts is None:
        return
    if problem := refusal(loaded.spec.features | facts.features) or facts.problem:
        raise SpecError(problem)
    if newest is not None:
        saved = {name: tuple(tensor["shape"]) for name, tensor in newest.tensors.items()}
        check_shapes(facts.shapes, saved, newest.folder)


def _training_data(loaded: LoadedSpec) -> StoredData:
    spec = loaded.spec.data
    if spec.mix is None:
        assert spec.train is not None
        return _checked("data.train", [spec.train], loaded, loaded.spec.plan, lambda: load_data(spec))
    return _checked("data.mix", [part.url for part in spec.mix], loaded, loaded.spec.plan, lambda: load_data(spec))


def _checked(
    key: str, urls: list[str], loaded: LoadedSpec, plan: PlanSpec, load: Callable[[], StoredData]
) -> StoredData:
    """Load data, and check that the job can read it and that a plan fits it.

    Args:
        key: Key of the YAML that gives the data, for messages.
        urls: Paths or URLs of the data.
        loaded: The job.
        plan: Settings of the plan.
        load: Callback that loads the data.
    """
    for url in urls:
        _refuse_lost_path(key, url, loaded)
    try:
        for url in urls:
            renew_copy(url)
        data = load()
        data.select(loaded.spec.data.columns)
        data.check_files()
        Plan(plan, data.num_rows)
        if isinstance(data, Mixture):
            data.check_plan(plan)
    except (StorageError, ManifestError, SpecError) as error:
        raise type(error)(f"{loaded.origin(key)}: {key}: {error}") from error
    return data


def _check_horovod(loaded: LoadedSpec, has_gpus: bool) -> None:
    from undula.elastic.ray.horovod import check  # which imports Ray Train

    check(has_gpus)


def _refuse_on_cpu(loaded: LoadedSpec) -> None:
    """Refuse shards in host memory, where they are in any case, and a precision in which this machine's CPU cannot compute; the workers
    check theirs again."""
    if loaded.spec.sharding.offload != "none":
        raise SpecError(
            f"{loaded.origin('sharding.offload')}: sharding.offload=all has no effect without GPUs; remove it, or train on GPUs"
        )
    if problem := cpu_problem(loaded.spec.precision.compute):
        raise SpecError(f"{loaded.origin('precision.compute')}: {problem}")


def _run_directory(loaded: LoadedSpec) -> Store:
    """Return the job's run directory, after checking that it is writable and is not the directory of a study."""
    try:
        store = open_store(loaded.spec.run_url)
        store.check_writable()
    except StorageError as error:
        raise type(error)(f"{loaded.origin('runs')}: runs: the run directory is not writable: {error}") from error
    if store.exists(STUDY_FILE):
        raise RunError(f"{store.url} is a study's directory; give the run another name")
    return store


def _refuse_lost_path(key: str, url: str, loaded: LoadedSpec) -> None:
    """Refuse a relative path in a submitted job, because Ray runs the job in a copy of its working directory and deletes the copy."""
    if not url.startswith(("/", "~", "s3://")) and "/runtime_resources/working_dir_files/" in str(Path.cwd()):
        raise SpecError(
            f"{loaded.origin(key)}: {key} is {url!r}, relative to a copy of the working directory that Ray deletes when the job ends; "
            "give an absolute path or an s3:// URL"
        )


def _refuse_changes(store: Store, loaded: LoadedSpec, data: Data) -> None:
    """Refuse to resume a run with other training data, or with another value of a key that defines the logical run."""
    if not store.exists(JOB_FILE):
        return
    fix = "restore it, set another name, or start over with --fresh"
    try:
        begun = json.loads(store.read(JOB_FILE))
        digest, change = begun["manifest_digest"], changed_key(begun["spec"], loaded.tree())
        before = recorded_data(begun["dataset"]) if "dataset" in begun else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{store.url}/{JOB_FILE} is damaged ({error}); {fix}") from error
    if isinstance(data, IndexedData) and before and (difference := data.difference(before)):
        raise RunError(f"run.dataset() got a dataset with {difference}, with which {store.url} was started; {fix}")
    if digest != data.digest:
        now = "the script" if isinstance(data, IndexedData) else data.url
        raise RunError(f"{store.url} was started with other training data than {now} has now; {fix}")
    if change:
        key, before, now = change
        raise RunError(
            f"{loaded.origin(key)}: {key} is {json.dumps(now)}, but {store.url} was started with {json.dumps(before)}; {fix}"
        )
