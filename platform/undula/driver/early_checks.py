"""Checks of a job's data and its run directory that need neither torch nor Ray, so that they are made before a cluster starts as well."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from undula.config.job import LoadedSpec, changed_key
from undula.data.planned import Data
from undula.data.script.indexed import IndexedData, recorded_data
from undula.data.stored.index import renew_copy
from undula.data.stored.manifest import difference, load_manifest
from undula.data.stored.mixture import Mixture, StoredData, load_data
from undula.errors import ManifestError, RunError, SpecError, StorageError
from undula.plan.plan import Plan, PlanSpec
from undula.state.commit import Commit, find_commits
from undula.state.directory import JOB_FILE, STUDY_FILE, held, job_record
from undula.state.events import EndEvent, FailEvent
from undula.state.ledger import decode_events, has_steps, read_ledger
from undula.storage import Store, open_store


def check_before_cluster(loaded: LoadedSpec, fresh: bool) -> bool:
    """Check what the driver will check again, as far as files of this machine are concerned and the script need not run for it.

    Args:
        loaded: The job, without what its script adds to the settings.
        fresh: Whether the run starts over.

    Returns:
        Whether the run is finished, so that its driver needs no cluster.

    Raises:
        UndulaError: The driver would refuse the job.
    """
    spec, data = loaded.spec, None
    urls = [spec.data.train, spec.data.validation, *(part.url for part in spec.data.mix or ())]
    if not spec.data.is_of_script and not any(url and url.startswith("s3://") for url in urls):
        data = check_data(loaded)
    if spec.run_url.startswith("s3://"):
        return False
    store = run_directory(loaded)
    if not store.exists(JOB_FILE):
        return False
    with held(store):
        newest = None if fresh else next(iter(find_commits(store)[0]), None)
        if fresh or (newest is None and not has_steps(store)):
            return False
        refuse_changes(store, loaded, data, is_whole=False)
        if newest is None or newest.step < job_record(store).get("total_steps", newest.step + 1):
            return False
        return is_intact_end(store, newest)


def check_data(loaded: LoadedSpec) -> StoredData:
    """Check that the data of a job's YAML can be read, and return the training data.

    Raises:
        UndulaError: The first mistake that was found.
    """
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
        refuse_lost_path(key, url, loaded)
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


def is_intact_end(store: Store, last: Commit) -> bool:
    """Return whether the last checkpoint of a run is undamaged, and the script has not failed in its work after it, which it does again."""
    return not last.damage(store, sorted(last.files)) and not _has_failed(store)


def _has_failed(store: Store) -> bool:
    last = [event for event in decode_events(read_ledger(store).events) if isinstance(event, EndEvent | FailEvent)][-1:]
    return any(isinstance(event, FailEvent) for event in last)


def run_directory(loaded: LoadedSpec) -> Store:
    """Return the job's run directory, after checking that it is writable and is not the directory of a study. This leaves no new folder."""
    try:
        store = open_store(loaded.spec.run_url)
        is_new = not store.is_s3 and not store.exists()
        store.check_writable()
        if is_new:
            with suppress(OSError):  # another job may write to it already
                Path(store.path()).rmdir()
    except StorageError as error:
        raise type(error)(f"{loaded.origin('runs')}: runs: the run directory is not writable: {error}") from error
    if store.exists(STUDY_FILE):
        raise RunError(f"{store.url} is a study's directory; give the run another name")
    return store


def refuse_lost_path(key: str, url: str, loaded: LoadedSpec) -> None:
    """Refuse a relative path in a submitted job, because Ray runs the job in a copy of its working directory and deletes the copy."""
    if not url.startswith(("/", "~", "s3://")) and "/runtime_resources/working_dir_files/" in str(Path.cwd()):
        raise SpecError(
            f"{loaded.origin(key)}: {key} is {url!r}, relative to a copy of the working directory that Ray deletes when the job ends; "
            "give an absolute path or an s3:// URL"
        )


def refuse_changes(store: Store, loaded: LoadedSpec, data: Data | None, is_whole: bool = True) -> None:
    """Refuse to resume a run with other training data, or with another value of a key that defines the logical run.

    Args:
        store: Run directory.
        loaded: The job.
        data: Training data; None if they are not known.
        is_whole: Whether the job has the settings that its script adds. Otherwise, only keys that are given outside of the script count.
    """
    if not store.exists(JOB_FILE):
        return
    fix = "restore it, set another name, or start over with --fresh"
    try:
        begun = json.loads(store.read(JOB_FILE))
        digest = begun["manifest_digest"]
        given = None if is_whole else {key for key in loaded.origins if not key.startswith("config")}
        change = changed_key(begun["spec"], loaded.tree(), given)
        before = recorded_data(begun["dataset"]) if "dataset" in begun else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{store.url}/{JOB_FILE} is damaged ({error}); {fix}") from error
    if isinstance(data, IndexedData) and before and (difference := data.difference(before)):
        raise RunError(f"run.dataset() got a dataset with {difference}, with which {store.url} was started; {fix}")
    if data and digest != data.digest:
        now = "the script" if isinstance(data, IndexedData) else data.url
        raise RunError(f"{store.url} was started with other training data than {now} has now; {fix}")
    if change:
        key, before, now = change
        raise RunError(
            f"{loaded.origin(key)}: {key} is {json.dumps(now)}, but {store.url} was started with {json.dumps(before)}; {fix}"
        )
