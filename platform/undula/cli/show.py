"""Command `undula show`."""

from pathlib import Path

import click

from undula.cli.options import json_option, runs_option
from undula.cli.prices import price_finder, price_options


@click.command(short_help="Show the figures, costs, curves and events of a run.")
@click.argument("run", metavar="RUN")
@runs_option
@price_options
@json_option
def show(run: str, runs: str | None, prices: Path | None, spot_prices: str | None, as_json: bool) -> None:
    """Show a run in the terminal: its figures, costs, curves and newest events.

    RUN is a name that `undula ls` lists, or the run's directory as a path or an s3:// URL.
    """
    from undula.report.render.terminal import print_run
    from undula.state.locate import locate_run

    print_run(locate_run(run, runs), as_json, price_finder(prices, spot_prices))
