"""Default places of state. The module imports nothing heavy, because the command line shows these places in its help."""

import os
from pathlib import Path

DEFAULT_RUNS = "~/undula/runs"
"""Folder of the run directories, if a job does not set `runs`."""
MEMORY = Path(os.environ.get("UNDULA_MEMORY", "/dev/shm"))
"""In-memory file system in which a node keeps its snapshots. If several nodes share a machine, each has its own folder."""
