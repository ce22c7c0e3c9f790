"""Options of `undula show` and `undula report` that select prices."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from undula.cli.options import FILE

if TYPE_CHECKING:
    from undula.report.data.cost import PriceFinder

F = TypeVar("F", bound=Callable[..., Any])


prices_option = click.option(
    "--prices",
    type=FILE,
    metavar="FILE",
    help="TOML file with prices of machines, which override the built-in prices.  [default: the file at UNDULA_PRICES]",
)


def price_options(command: F) -> F:
    """Add the options `--prices` and `--spot-prices` to a command."""
    history = click.option(
        "--spot-prices",
        type=click.Choice(["aws"]),
        help="Ask AWS for the spot prices at the time of the run, with your credentials.  [default: the spot prices of the files]",
    )
    return prices_option(history(command))


def price_finder(prices: Path | None, spot_prices: str | None) -> "PriceFinder":
    """Return a function that finds the prices at the time of a run.

    Raises:
        SpecError: The file has no prices.
    """
    from undula.cluster.prices import load_prices, with_aws_history

    loaded = load_prices(prices)
    return partial(with_aws_history, loaded) if spot_prices else lambda events: loaded
