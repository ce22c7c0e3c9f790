"""Prices of machines: the lists that ship, a file of one's own, and what AWS remembers of its spot prices."""

import math
import os
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from undula.errors import SpecError
from undula.plan.fleet import ON_DEMAND, SPOT
from undula.plan.prices import MARKETS, Machine, PriceList, Prices
from undula.state.events import Event, GroupEvent, WaitingEvent

PRICES_FILE = "UNDULA_PRICES"
"""Environment variable that names a file of prices, where no option does."""
AWS_TITLE = "AWS's spot price history, mean over the time of the run"
SHIPPED = "prices.toml"
_KEYS = ("date", "source", "regions", *MARKETS)
_TIMEOUT_S = 10.0


def load_prices(path: Path | None = None) -> Prices:
    """The prices that ship, and before them those of a file: `path`, or the one that UNDULA_PRICES names.

    Raises:
        SpecError: the file cannot be read, or is not of the form of prices.toml.
    """
    path = path or (Path(os.environ[PRICES_FILE]) if os.environ.get(PRICES_FILE) else None)
    own = _parse(_read(path), str(path)) if path else ()
    return Prices((*own, *_parse((files("undula.cluster") / SHIPPED).read_text(encoding="utf-8"), SHIPPED)))


def _read(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read: {error}: name a file of prices in TOML") from None


def _parse(text: str, name: str) -> tuple[PriceList, ...]:
    """The lists of a file, in its order."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{name} is no TOML: {error}") from None
    return tuple(_parse_list(key, each, f"{name}: {key}") for key, each in tree.items())


def _parse_list(name: str, tree: Any, where: str) -> PriceList:
    if not isinstance(tree, Mapping):
        raise SpecError(
            f'{where} is no list of prices: write a table, [{name}] with date = "2026-11-22" and prices below'
        )
    for key in tree:
        if key not in _KEYS:
            raise SpecError(f"{where}.{key} is no key of a list of prices: use {', '.join(_KEYS)}")
    if "date" not in tree:
        raise SpecError(f'{where}.date is not there: say of when the prices are, as date = "2026-11-22"')
    regions = tree.get("regions", [])
    if not isinstance(regions, list) or not all(isinstance(each, str) for each in regions):
        raise SpecError(f'{where}.regions is {regions!r}: give a list of names, as ["us-west-2"]')
    on_demand, spot = (_parse_market(tree.get(market, {}), f"{where}.{market}") for market in (ON_DEMAND, SPOT))
    if not on_demand and not spot:
        raise SpecError(
            f'{where} has no price: give some in [{name}.on-demand] or [{name}.spot], as "g6.xlarge" = 0.8048'
        )
    return PriceList(name, str(tree["date"]), str(tree.get("source", "")), tuple(regions), on_demand, spot)


def _parse_market(tree: Any, where: str) -> dict[str, float]:
    if not isinstance(tree, Mapping):
        raise SpecError(f'{where} is {tree!r}: give a price for each machine, as "g6.xlarge" = 0.8048')
    for machine, hourly in tree.items():
        if isinstance(hourly, Mapping):
            raise SpecError(
                f'{where}.{machine} is no price: put names that have a dot into quotes, as "g6.xlarge" = 0.8048'
            )
        if isinstance(hourly, bool) or not isinstance(hourly, int | float) or not 0 <= hourly < math.inf:
            raise SpecError(f"{where}.{machine} is {hourly!r}: give US dollars an hour, as 0.8048")
    return {machine: float(hourly) for machine, hourly in tree.items()}


def with_aws_history(prices: Prices, events: Sequence[Event]) -> Prices:
    """With the spot prices of the machines and the time of a run, as far as AWS tells them; a note says where it does not."""
    used = {
        machine
        for event in events
        if isinstance(event, GroupEvent | WaitingEvent)
        for machine in map(Machine.of, event.workers)
        if machine.market == SPOT and "." in (machine.type or "")  # of all clouds' names, AWS's have a dot
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
            found = spot_history(region or None, machines, began, ended)
        except SpecError as error:
            notes.append(str(error))
            continue
        seen |= found
        for kind in sorted({str(each.type) for each in machines - found.keys()}):
            notes.append(f"AWS has no spot price of {kind} for the time of the run, so those of the lists are taken")
    return replace(prices, seen=seen, seen_title=AWS_TITLE, notes=tuple(notes))


def _region(machine: Machine) -> str:
    """The region of a machine; empty where its labels do not say."""
    found = re.match(r"[a-z]+(-gov)?-[a-z]+-\d+", machine.zone or "")  # of us-west-2a and us-west-2-lax-1a
    return machine.region or (found[0] if found else "")


def spot_history(region: str | None, machines: Iterable[Machine], began: float, ended: float) -> dict[Machine, float]:
    """Mean spot prices in a region over a time, in US dollars an hour; of a machine whose zone is not known, the mean over the zones.

    Args:
        region: by default the one of AWS's own settings.
        machines: of which to ask; those that AWS says nothing of are not in the answer.
        began: the time, in seconds since the epoch.
        ended: its end.

    Raises:
        SpecError: AWS does not answer, or not to us.
    """
    import boto3  # here, as `undula show` needs it for nothing else
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    machines = set(machines)
    times = {"StartTime": datetime.fromtimestamp(began, UTC), "EndTime": datetime.fromtimestamp(ended, UTC)}
    changes: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    try:
        config = Config(connect_timeout=_TIMEOUT_S, read_timeout=_TIMEOUT_S, retries={"total_max_attempts": 2})
        client = boto3.Session().client("ec2", region_name=region or os.environ.get("AWS_REGION"), config=config)
        pages = client.get_paginator("describe_spot_price_history").paginate(
            InstanceTypes=sorted({str(each.type) for each in machines}), ProductDescriptions=["Linux/UNIX"], **times
        )
        for row in (row for page in pages for row in page["SpotPriceHistory"]):
            change = (row["Timestamp"].timestamp(), float(row["SpotPrice"]))
            changes[row["InstanceType"], row["AvailabilityZone"]].append(change)
    except (BotoCoreError, ClientError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise SpecError(
            f"AWS does not tell its spot prices ({why}), so those of the lists are taken: "
            "it takes credentials that allow ec2:DescribeSpotPriceHistory, and a region"
        ) from None
    found = {}
    for machine in machines:
        zones = [
            mean_price(each, began, ended)
            for (kind, zone), each in changes.items()
            if kind == machine.type and machine.zone in (None, zone)
        ]
        if zones:
            found[machine] = sum(zones) / len(zones)
    return found


def mean_price(changes: Sequence[tuple[float, float]], began: float, ended: float) -> float:
    """The mean over a time of a price that changed at some moments.

    Args:
        changes: seconds since the epoch, and the price from then on; at least one. AWS gives the one before `began` too; without it,
            the price from `began` on is taken to be the first one.
        began: the time, in seconds since the epoch.
        ended: its end, which lies after it.
    """
    ordered = sorted(changes)
    starts = [began, *(min(max(when, began), ended) for when, _ in ordered[1:]), ended]
    spans = zip(ordered, starts, starts[1:], strict=False)
    return sum(price * (until - since) for (_, price), since, until in spans) / (ended - began)
