"""Finds the directory of a run or a study by its path, its s3:// URL or its name."""

from undula.errors import RunError
from undula.state.defaults import default_runs
from undula.state.directory import JOB_FILE, STUDY_FILE
from undula.state.ledger_files import LEDGER
from undula.storage import Store, open_store


def locate_run(run: str, runs: str | None = None) -> Store:
    """Return the directory of a run.

    Args:
        run: Path, s3:// URL or name of the run.
        runs: Folder in which a name is looked up. By default, the name is looked up in the working directory and then in
            `default_runs`.

    Raises:
        RunError: There is no run of that name, and no such folder.
    """
    return _locate("run", run, runs, (JOB_FILE, LEDGER, STUDY_FILE))


def locate_study(study: str, runs: str | None = None) -> Store:
    """Return the directory of a study, found in the same way as a run's by `locate_run`.

    Raises:
        RunError: There is no study of that name, and no such folder.
    """
    return _locate("study", study, runs, (STUDY_FILE,))


def _locate(kind: str, given: str, runs: str | None, files: tuple[str, ...]) -> Store:
    here = open_store(given)
    if "://" in given or given.startswith(("/", "~")):
        return here
    below = open_store(f"{(runs or default_runs()).rstrip('/')}/{given}")
    order = (here, below) if runs is None else (below, here)
    for store in order:
        if any(store.exists(file) for file in files):
            return store
    if existing := next((store for store in order if store.exists()), None):
        return existing  # the caller reports what the folder lacks
    raise RunError(
        f"there is no {kind} {given} in {runs or default_runs()}, and no folder {given} here; give the {kind}'s directory, or the "
        "folder of the runs with --runs"
    )
