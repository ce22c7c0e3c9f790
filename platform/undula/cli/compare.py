"""Command `undula compare`."""

from pathlib import Path

import click

from undula.cli.options import json_option, print_json, runs_option, tolerance_option
from undula.cli.prices import price_finder, price_options


@click.command(short_help="Compare runs: curves, settings, verified equality.")
@click.argument("names", metavar="RUN RUN...", nargs=-1, required=True)
@click.option(
    "--out",
    default="compare.html",
    show_default=True,
    metavar="FILE",
    help="File for the page: a path or an s3:// URL.",
)
@tolerance_option
@runs_option
@price_options
@json_option
def compare(
    names: tuple[str, ...],
    out: str,
    tolerance: float,
    runs: str | None,
    prices: Path | None,
    spot_prices: str | None,
    as_json: bool,
) -> None:
    """Write a page that compares 2 to 8 runs: their curves over samples, steps, time and dollars, the settings that differ, and whether
    runs of one plan are the same training.

    RUN is a name that `undula ls` lists, or the run's directory as a path or an s3:// URL. The command prints the settings that differ.
    """
    import time

    from undula.errors import SpecError
    from undula.report.data.comparison import compare as compared
    from undula.report.data.run_record import read_run
    from undula.report.render.comparison import MOST_RUNS, render_comparison
    from undula.report.render.terminal import print_comparison
    from undula.state.locate import locate_run
    from undula.storage import write_file

    if not 2 <= len(set(names)) == len(names) <= MOST_RUNS:
        raise SpecError(f"{len(names)} runs are given; name 2 to {MOST_RUNS} different ones")
    ends = [name.rstrip("/").rpartition("/")[2] for name in names]
    labels = ends if len(set(ends)) == len(ends) else names
    records = {label: read_run(locate_run(name, runs)) for label, name in zip(labels, names, strict=True)}
    comparison = compared(records, time.time(), price_finder(prices, spot_prices), tolerance)
    write_file(out, render_comparison(comparison).encode())
    if as_json:
        print_json({**comparison.as_json(), "page": out})
    else:
        print_comparison(comparison)
        click.echo(out)
