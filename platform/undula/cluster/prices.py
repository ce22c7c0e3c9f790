"""Prices of machines from the shipped price lists, the user's price file and AWS's history of spot prices."""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from undula.cluster.price_file import parse_prices
from undula.errors import SpecError, one_line
from undula.plan.fleet import SPOT
from undula.plan.prices import Machine, Prices
from undula.state.events import Event, GroupEvent, WaitingEvent

PRICES_FILE = "UNDULA_PRICES"
"""Environment variable with the path of a price file, used if no option gives one."""
AWS_TITLE = "AWS's spot price history, mean over the time of the run"
SHIPPED = "prices.toml"
_TIMEOUT_S = 10.0


def load_prices(path: Path | None = None) -> Prices:
    """Load the shipped price lists, preceded by the lists in the user's file, which is `path` or the file that UNDULA_PRICES names.

    Raises:
        SpecError: The file cannot be read, or does not have the form of prices.toml.
    """
    path = path or (Path(os.environ[PRICES_FILE]) if os.environ.get(PRICES_FILE) else None)
    own = parse_prices(_read(path), str(path)) if path else ()
    shipped = (files("undula.cluster") / SHIPPED).read_text(encoding="utf-8")
    return Prices((*own, *parse_prices(shipped, SHIPPED)))


def _read(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read ({error}): name a price file in TOML") from None


def with_aws_history(prices: Prices, events: Sequence[Event]) -> Prices:
    """Return `prices` with AWS's spot prices for the machines and the time of a run. Notes name the machine types without such a price."""
    used = {
        machine
        for event in events
        if isinstance(event, GroupEvent | WaitingEvent)
        for machine in map(Machine.of, event.workers)
        if machine.market == SPOT and "." in (machine.type or "")  # only AWS has a dot in the names of machine types
    }
    if not used:
        return prices
    began, ended = events[0].time, max(events[-1].time, events[0].time + 1.0)
    by_region = defaultdict(set)
    for machine in used:
        by_region[_region(machine)].add(machine)
    seen: dict[Machine, float] = {}
    notes = list(prices.notes)
    for region, machines in sorted(by_region.items()):
        try:
            hourly = spot_history(region or None, machines, began, ended)
        except SpecError as error:
            notes.append(str(error))
            continue
        seen |= hourly
        for kind in sorted({str(machine.type) for machine in machines - hourly.keys()}):
            notes.append(f"AWS has no spot price of {kind} for the time of the run, so the price lists are used for it")
    return replace(prices, seen=seen, seen_title=AWS_TITLE, notes=tuple(notes))


def _region(machine: Machine) -> str:
    """Return the region of a machine, or an empty string if its labels do not give one."""
    match = re.match(r"[a-z]+(-gov)?-[a-z]+-\d+", machine.zone or "")  # us-west-2 in us-west-2a and us-west-2-lax-1a
    return machine.region or (match[0] if match else "")


def spot_history(region: str | None, machines: Iterable[Machine], began: float, ended: float) -> dict[Machine, float]:
    """Return mean spot prices in a region over a period, in US dollars per hour. If the zone of a machine is unknown, average all zones.

    Args:
        region: Name of the region; by default the region in AWS's own settings.
        machines: Machines to look up. The result lacks the machines for which AWS has no prices.
        began: Start of the period in seconds since the epoch.
        ended: End of the period in seconds since the epoch.

    Raises:
        SpecError: AWS does not answer, or denies access.
    """
    import boto3  # imported here because it is slow, and `undula show` rarely needs it
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    machines = set(machines)
    times = {"StartTime": datetime.fromtimestamp(began, UTC), "EndTime": datetime.fromtimestamp(ended, UTC)}
    changes: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    try:
        config = Config(connect_timeout=_TIMEOUT_S, read_timeout=_TIMEOUT_S, retries={"total_max_attempts": 2})
        client = boto3.Session().client("ec2", region_name=region or os.environ.get("AWS_REGION"), config=config)
        pages = client.get_paginator("describe_spot_price_history").paginate(
            InstanceTypes=sorted({str(machine.type) for machine in machines}),
            ProductDescriptions=["Linux/UNIX"],
            **times,
        )
        for row in (row for page in pages for row in page["SpotPriceHistory"]):
            change = (row["Timestamp"].timestamp(), float(row["SpotPrice"]))
            changes[row["InstanceType"], row["AvailabilityZone"]].append(change)
    except (BotoCoreError, ClientError) as error:
        why = one_line(error).rstrip(".")
        raise SpecError(
            f"AWS's spot prices cannot be fetched ({why}), so the price lists are used: "
            "give credentials that allow ec2:DescribeSpotPriceHistory, and a region"
        ) from None
    hourly = {}
    for machine in machines:
        zones = [
            mean_price(history, began, ended)
            for (kind, zone), history in changes.items()
            if kind == machine.type and machine.zone in (None, zone)
        ]
        if zones:
            hourly[machine] = sum(zones) / len(zones)
    return hourly


def mean_price(changes: Sequence[tuple[float, float]], began: float, ended: float) -> float:
    """Return the mean of a price over a period.

    Args:
        changes: Times of at least one change in seconds since the epoch, each with the new price. AWS also returns the last change
            before `began`; without it, the first price is assumed to be valid from `began` on.
        began: Start of the period in seconds since the epoch.
        ended: End of the period in seconds since the epoch, after `began`.
    """
    ordered = sorted(changes)
    starts = [began, *(min(max(when, began), ended) for when, _ in ordered[1:]), ended]
    spans = zip(ordered, starts, starts[1:], strict=False)
    return sum(price * (until - since) for (_, price), since, until in spans) / (ended - began)
