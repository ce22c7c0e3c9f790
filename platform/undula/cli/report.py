"""Command `undula report`."""

from pathlib import Path

import click

from undula.cli.options import json_option, print_json, runs_option
from undula.cli.prices import price_finder, price_options


@click.command(short_help="Write a run's figures as an HTML page.")
@click.argument("run", metavar="RUN")
@click.option("--out", metavar="FILE", help="File for the page: a path or an s3:// URL.  [default: RUN/report.html]")
@runs_option
@price_options
@json_option
def report(
    run: str, out: str | None, runs: str | None, prices: Path | None, spot_prices: str | None, as_json: bool
) -> None:
    """Write report.html into a run's directory: one self-contained page with the figures, costs, curves and events.

    RUN is a name that `undula ls` lists, or the run's directory as a path or an s3:// URL. The command prints the path of the page.
    """
    from undula.report.render.page import write_report
    from undula.state.locate import locate_run

    page = write_report(locate_run(run, runs), price_finder(prices, spot_prices), out=out)
    if as_json:
        print_json({"report": page})
    else:
        click.echo(page)
