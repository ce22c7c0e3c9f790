"""The options of `undula show` and `undula report` that say which prices count."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from undula.plan.prices import Prices
    from undula.state.events import Event


def add_price_arguments(parser: argparse.ArgumentParser) -> None:
    text = "prices of machines in TOML, before those that ship (default: the file that UNDULA_PRICES names)"
    parser.add_argument("--prices", type=Path, metavar="FILE", help=text)
    text = "ask AWS for the spot prices of the time of the run, with your credentials (default: those of the file)"
    parser.add_argument("--spot-prices", choices=["aws"], help=text)


def price_finder(options: argparse.Namespace) -> "Callable[[Sequence[Event]], Prices]":
    """The prices of the time of a run, given its events; SpecError where the file of prices is none."""
    from undula.cluster.prices import load_prices, with_aws_history

    prices = load_prices(options.prices)
    return partial(with_aws_history, prices) if options.spot_prices else lambda events: prices
