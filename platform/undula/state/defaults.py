"""Places of state. The module imports nothing heavy, because the command line needs these places for its help and its checks."""

import os
from pathlib import Path

DEFAULT_RUNS = "~/undula/runs"
"""Folder of the run directories, if neither a job nor UNDULA_RUNS sets another."""
RUNS_VARIABLE = "UNDULA_RUNS"
TENSORBOARD, TRACKERS = "tensorboard", "trackers"
"""Folders in a run directory for the files of TensorBoard and of other trackers."""
MEMORY = Path(os.environ.get("UNDULA_MEMORY", "/dev/shm"))
"""In-memory file system in which a node keeps its snapshots. Nodes of one machine may share it."""
FREE_SHARE = 0.5
"""Maximum share of the free memory of a node that snapshots, or replicas on the head, may take."""


def default_runs() -> str:
    """Return the folder of the run directories that UNDULA_RUNS names, or else DEFAULT_RUNS."""
    return os.environ.get(RUNS_VARIABLE) or DEFAULT_RUNS
