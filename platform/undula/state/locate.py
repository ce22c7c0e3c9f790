"""Finds the directory of a run or a study from what a user gives: a path, an s3:// URL, or a name."""

from undula.errors import RunError
from undula.state.defaults import DEFAULT_RUNS
from undula.state.directory import JOB_FILE, STUDY_FILE
from undula.state.ledger import LEDGER
from undula.storage import Store, open_store


def locate_run(run: str, runs: str | None = None) -> Store:
    """Directory of a run.

    Args:
        run: Path, s3:// URL or name of the run.
        runs: Folder of runs in which a name is looked up. By default it is DEFAULT_RUNS, where a run of that name in the working
            directory comes first.

    Raises:
        RunError: there is none of that name, and no such path.
    """
    return _locate("run", run, runs, (JOB_FILE, LEDGER, STUDY_FILE))


def locate_study(study: str, runs: str | None = None) -> Store:
    """Directory of a study, found as `locate_run` finds a run's.

    Raises:
        RunError: there is none of that name, and no such path.
    """
    return _locate("study", study, runs, (STUDY_FILE,))


def _locate(kind: str, given: str, runs: str | None, files: tuple[str, ...]) -> Store:
    here, below = open_store(given), open_store(f"{(runs or DEFAULT_RUNS).rstrip('/')}/{given}")
    if "://" in given or given.startswith(("/", "~")):
        return here
    order = (here, below) if runs is None else (below, here)
    for store in order:
        if any(store.exists(file) for file in files):
            return store
    if found := next((store for store in order if store.exists()), None):
        return found  # whoever reads it says what it lacks
    raise RunError(
        f"there is no {kind} {given} in {runs or DEFAULT_RUNS}, and no folder {given} here: give the {kind}'s directory, or the "
        "folder of the runs with --runs"
    )
