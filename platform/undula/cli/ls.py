"""Command `undula ls`."""

import click

from undula.cli.options import json_option
from undula.state.defaults import DEFAULT_RUNS


@click.command(short_help="List runs.")
@click.argument("runs", metavar="[RUNS]", default=DEFAULT_RUNS)
@json_option
def ls(runs: str, as_json: bool) -> None:
    """List the runs in the folder RUNS, a path or an s3:// URL, by default ~/undula/runs."""
    from undula.report.render.terminal import print_runs
    from undula.storage import open_store

    print_runs(open_store(runs), as_json)
