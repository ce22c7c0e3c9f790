"""Command `undula ls`."""

import click

from undula.cli.options import json_option
from undula.state.defaults import DEFAULT_RUNS


@click.command(short_help="List runs.")
@click.argument("runs", metavar="[RUNS]", default=DEFAULT_RUNS)
@click.option(
    "--where",
    multiple=True,
    metavar="CONDITION",
    help="Only runs with this value, such as state=finished, 'steps>=100' or schedule.base_lr=0.1; can be given several times.",
)
@click.option(
    "--sort",
    metavar="KEY",
    help="Order of the runs, such as last_validation_loss, or -steps for the largest first.  [default: the newest first]",
)
@json_option
def ls(runs: str, where: tuple[str, ...], sort: str | None, as_json: bool) -> None:
    """List the runs in the folder RUNS, a path or an s3:// URL, by default ~/undula/runs.

    The keys of --where and --sort are those of --json, such as best_validation_loss or validation_metrics.accuracy, and the settings of
    the jobs, such as plan.global_batch. The list shows their values.
    """
    from undula.report.data.selection import selection
    from undula.report.render.terminal import print_runs
    from undula.storage import open_store

    print_runs(open_store(runs), as_json, selection(where, sort))
