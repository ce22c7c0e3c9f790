"""Default places of state, in a module that imports nothing heavy: the command line shows them in its help."""

import os
from pathlib import Path

DEFAULT_RUNS = "~/undula/runs"
"""Folder of the run directories of a job that names none."""
MEMORY = Path(os.environ.get("UNDULA_MEMORY", "/dev/shm"))
"""File system in memory in which a node keeps its snapshots. Each of several nodes on one machine has its own."""
