"""Defaults that the command line shows in its help, in a module that imports nothing."""

DEFAULT_RUNS = "~/undula/runs"
"""Folder of the run directories of a job that names none."""
