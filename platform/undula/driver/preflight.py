"""Checks of the driver before any worker starts: of the data, the run directory, the model, and the state from which a run resumes."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from undula.config.job import LoadedSpec
from undula.data.planned import Data
from undula.data.script.indexed import ScriptData
from undula.data.stored.mixture import StoredData
from undula.driver.early_checks import check_data, is_intact_end, refuse_changes, refuse_lost_path, run_directory
from undula.driver.model_facts import ModelFacts, script_facts
from undula.driver.trackers import checked_trackers
from undula.errors import SpecError
from undula.parallel.capabilities import refusal
from undula.parallel.engines.library import library_named
from undula.parallel.precision import cpu_problem
from undula.plan.plan import Plan
from undula.state.commit import Commit, find_commits
from undula.state.ledger import has_steps
from undula.state.model_state import check_shapes
from undula.storage import Store
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
    store = run_directory(loaded)
    trackers = checked_trackers(loaded, store)
    examined = examine(train, loaded, stored)
    plan = examined.plan
    newest = None if fresh else next(iter(find_commits(store)[0]), None)
    if newest is not None or (not fresh and has_steps(store)):
        refuse_changes(store, loaded, examined.data)
    check_model(examined.model, loaded, newest)
    is_at_end = newest is not None and (
        newest.step >= plan.total_steps or bool(newest.results.reason_to_stop(loaded.spec.stop))
    )
    is_finished = is_at_end and newest is not None and is_intact_end(store, newest)
    return Prepared(store, plan, is_finished, examined.script_data, trackers)


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
    _check_library(loaded.spec.engine, has_gpus=loaded.spec.workers.gpus not in ("auto", 0))
    if loaded.spec.workers.gpus == 0:
        _refuse_on_cpu(loaded)
    refuse_lost_path("runs", loaded.spec.runs, loaded)
    return None if loaded.spec.data.is_of_script else check_data(loaded)


def on_machines(loaded: LoadedSpec, have_gpus: Callable[[], bool]) -> LoadedSpec:
    """Return the job with numbers in place of the values that depend on the machines that train it.

    Args:
        loaded: The job.
        have_gpus: Callback that returns whether these machines have GPUs. It is called if the number of GPUs depends on that.

    Raises:
        ClusterError: The workers get GPUs, and the library that the job's engine names cannot use them.
        SpecError: The workers get no GPUs, and the job's settings need them.
    """
    spec = loaded.spec
    if spec.workers.gpus != "auto":
        return loaded
    workers = spec.workers.on_cluster(have_gpus())
    _check_library(spec.engine, has_gpus=bool(workers.gpus))
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


def _check_library(engine: str, has_gpus: bool) -> None:
    if library := library_named(engine):
        library.check(has_gpus)


def _refuse_on_cpu(loaded: LoadedSpec) -> None:
    """Refuse shards in host memory, where they are in any case, and a precision in which this machine's CPU cannot compute; the workers
    check theirs again."""
    if loaded.spec.sharding.offload != "none":
        raise SpecError(
            f"{loaded.origin('sharding.offload')}: sharding.offload=all has no effect without GPUs; remove it, or train on GPUs"
        )
    if problem := cpu_problem(loaded.spec.precision.compute):
        raise SpecError(f"{loaded.origin('precision.compute')}: {problem}")
