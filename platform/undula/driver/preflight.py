"""What can be known to be wrong before any worker starts: data, run directory, and whether the run can go on from what is there."""

import io
import json
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from undula.config.job import LoadedSpec, changed_key
from undula.data.manifest import load_manifest
from undula.data.mixture import Data, Mixture, load_data
from undula.elastic.ray.horovod import check as check_horovod
from undula.errors import ManifestError, RunError, SpecError, StorageError
from undula.plan.plan import Plan
from undula.state.commit import check_shapes, find_commits
from undula.state.directory import JOB_FILE, STUDY_FILE
from undula.state.model_state import MODEL
from undula.storage import Store, open_store
from undula.train.run import Run


@dataclass(frozen=True)
class Prepared:
    """A job that may start."""

    store: Store
    plan: Plan
    is_finished: bool
    """Whether the last step is in a whole checkpoint."""


def prepare(loaded: LoadedSpec, train: Callable[[Run], None], fresh: bool) -> Prepared:
    """Check everything that can be checked from here.

    Raises:
        UndulaError: one sentence for the first thing that is wrong.
    """
    spec = loaded.spec
    data = check_job(loaded)
    store = _run_directory(loaded)
    plan = Plan(spec.plan, data.num_rows)
    newest = None if fresh else next(iter(find_commits(store)[0]), None)
    if newest is not None:
        _refuse_changes(store, loaded, data)
        shapes = model_shapes(train, loaded, plan)
        if shapes is not None:
            check_shapes(newest, shapes, MODEL)
    is_at_end = newest is not None and newest.step >= plan.total_steps
    is_finished = is_at_end and newest is not None and not newest.damage(store, sorted(newest.files))
    return Prepared(store, plan, is_finished)


def model_shapes(train: Callable[[Run], None], loaded: LoadedSpec, plan: Plan) -> dict[str, tuple[int, ...]] | None:
    """Shapes of the script's model, by name, without making its weights; None where the script does not get there.

    Runs the train function up to `run.model(...)` on torch's meta device.
    """
    probe = _ShapeProbe(loaded, plan)
    try:
        with torch.device("meta"), redirect_stdout(io.StringIO()):
            train(probe)  # type: ignore[arg-type]
    except _ModelBuiltError as built:
        return built.shapes
    except Exception:
        # Whatever else the script does before its model, the workers will say; they check the shapes again.
        return None
    return None


class _ModelBuiltError(Exception):
    def __init__(self, shapes: dict[str, tuple[int, ...]]):
        self.shapes = shapes


class _ShapeProbe:
    def __init__(self, loaded: LoadedSpec, plan: Plan):
        self.config = loaded.config
        self.base_lr = loaded.spec.schedule.base_lr
        self.plan = plan
        self.rank, self.world_size, self.device = 0, 1, torch.device("meta")

    def map(self, *functions: object, **more: object) -> None:
        """Shapes do not depend on the samples."""

    def model(self, module: nn.Module) -> nn.Module:
        raise _ModelBuiltError({name: tuple(value.shape) for name, value in module.state_dict().items()})


def check_job(loaded: LoadedSpec) -> Data:
    """Check what does not depend on the run directory: the engine is installed, paths outlast the job, and data can be read.

    Returns:
        The training data.

    Raises:
        UndulaError: one sentence for the first thing that is wrong.
    """
    if loaded.spec.engine == "horovod":
        check_horovod(loaded.spec.horovod, has_gpus=loaded.spec.workers.gpus > 0)
    _refuse_lost_path("runs", loaded.spec.runs, loaded)
    data, spec = _training_data(loaded), loaded.spec.data
    if spec.validation is not None:
        url = spec.validation
        validation = _checked("data.validation", [url], loaded, lambda: load_manifest(url))
        if validation.select(spec.columns) != data.select(spec.columns):
            raise ManifestError(
                f"{url} has other columns than {data.url}: training and validation data share one schema"
            )
    return data


def _training_data(loaded: LoadedSpec) -> Data:
    spec = loaded.spec.data
    if spec.mix is None:
        assert spec.train is not None
        return _checked("data.train", [spec.train], loaded, lambda: load_data(spec))
    return _checked("data.mix", [part.url for part in spec.mix], loaded, lambda: load_data(spec))


def _checked(key: str, urls: list[str], loaded: LoadedSpec, load: Callable[[], Data]) -> Data:
    """Data that a job can read, with its plan."""
    for url in urls:
        _refuse_lost_path(key, url, loaded)
    try:
        data = load()
        data.select(loaded.spec.data.columns)
        data.check_files()
        Plan(loaded.spec.plan, data.num_rows)
        if isinstance(data, Mixture):
            data.check_plan(loaded.spec.plan)
    except (StorageError, ManifestError, SpecError) as error:
        raise type(error)(f"{loaded.origins.get(key, 'default')}: {key}: {error}") from error
    return data


def _run_directory(loaded: LoadedSpec) -> Store:
    try:
        store = open_store(loaded.spec.run_url)
        store.check_writable()
    except StorageError as error:
        origin = loaded.origins.get("runs", "default")
        raise StorageError(f"{origin}: runs: the run directory is not writable: {error}") from error
    if store.exists(STUDY_FILE):
        raise RunError(f"{store.url} is a study's directory: give the run another name")
    return store


def _refuse_lost_path(key: str, url: str, loaded: LoadedSpec) -> None:
    """A relative path of a submitted job lies in Ray's copy of its working directory, which goes when the job ends."""
    if not url.startswith(("/", "~", "s3://")) and "/runtime_resources/working_dir_files/" in str(Path.cwd()):
        raise SpecError(
            f"{loaded.origins.get(key, 'default')}: {key} is {url!r}, which is relative to this job's temporary copy of the "
            "working directory: give an absolute path or an s3:// URL"
        )


def _refuse_changes(store: Store, loaded: LoadedSpec, data: Data) -> None:
    """The run goes on only as the logical run that it was begun as."""
    if not store.exists(JOB_FILE):
        return
    mend = "restore it, give another name, or start over with --fresh"
    try:
        begun = json.loads(store.read(JOB_FILE))
        digest, change = begun["manifest_digest"], changed_key(begun["spec"], loaded.tree())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{store.url}/{JOB_FILE} is damaged ({error}): {mend}") from error
    if digest != data.digest:
        raise RunError(f"{store.url} was begun on other training data than {data.url} holds now: {mend}")
    if change:
        key, before, now = change
        raise RunError(
            f"{loaded.origins.get(key, 'default')}: {key} is {json.dumps(now)}, and {store.url} was begun with "
            f"{json.dumps(before)}: {mend}"
        )
