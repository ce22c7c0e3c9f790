"""Tests of the shipped price lists, a user's file, and AWS's price history through its protocol."""

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undula.cluster.check import load_cluster
from undula.cluster.node_types import node_types
from undula.cluster.prices import AWS_TITLE, PRICES_FILE, load_prices, mean_price, spot_history, with_aws_history
from undula.errors import SpecError
from undula.plan.prices import Machine, Prices
from undula.state.events import EndEvent, GroupEvent

CLUSTER = Path(__file__).parents[3] / "cluster.yaml"
BEGAN = 1_795_233_000.0
G6_A = Machine("g6.xlarge", "spot", "us-west-2", "us-west-2a")
OWN = """
[ours]
date = 2026-11-22
[ours.on-demand]
"g6.xlarge" = 0.5
"m9.huge" = 40
"""


def hourly(prices: Prices, machine: str, market: str, region: str | None = None) -> float | None:
    quote = prices.quote(Machine(machine, market, region), market)
    return quote.hourly if quote else None


@pytest.fixture(autouse=True)
def no_file_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PRICES_FILE, raising=False)


def test_the_shipped_lists_have_known_prices() -> None:
    prices = load_prices()
    known = {
        "g5.xlarge": 1.006,
        "g5.2xlarge": 1.212,
        "g6.xlarge": 0.8048,
        "g6.2xlarge": 0.9776,
        "a2-highgpu-1g": 3.673385,
    }
    assert {machine: hourly(prices, machine, "on-demand") for machine in known} == known
    for listed in prices.lists:
        assert re.fullmatch(r"20\d\d(-\d\d){0,2}", listed.date)
        assert listed.source
        assert listed.regions
        for machine, spot in listed.spot.items():
            assert 0 < spot < (hourly(prices, machine, "on-demand") or 0)


def test_each_machine_of_cluster_yaml_has_a_price() -> None:
    prices, kinds = load_prices(), node_types(load_cluster(CLUSTER))
    assert len([kind for kind in kinds if not kind.is_head]) > 1
    for kind in kinds:
        price = hourly(prices, kind.machine, "on-demand", "us-west-2")
        assert price or kind.is_head
        assert kind.max_price is None or float(kind.max_price) == price


def test_a_list_only_applies_to_its_regions() -> None:
    prices = load_prices()
    assert hourly(prices, "g6.xlarge", "on-demand", "us-east-1") == 0.8048
    assert hourly(prices, "g6.xlarge", "on-demand", "eu-west-1") is None
    assert hourly(prices, "g6.xlarge", "spot", "us-east-1") is None


def test_a_users_file_takes_precedence_over_the_shipped_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(OWN)
    for prices in (load_prices(path), by_variable(path, monkeypatch)):
        assert hourly(prices, "g6.xlarge", "on-demand", "eu-west-1") == 0.5
        assert hourly(prices, "m9.huge", "on-demand") == 40
        assert hourly(prices, "g5.xlarge", "on-demand") == 1.006
        assert prices.lists[0].title == "ours of 2026-11-22"


def by_variable(path: Path, monkeypatch: pytest.MonkeyPatch) -> Prices:
    monkeypatch.setenv(PRICES_FILE, str(path))
    return load_prices()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[ours", "is not TOML"),
        ("ours = 3", r"ours is 3: write a table \[ours\] with date ="),
        ('[ours.on-demand]\n"a" = 1', "ours.date is missing: write the date"),
        ("[ours]\ndate = [2026]\nspot = {a = 1}", r"ours.date is \[2026\]: write the date"),
        ('[ours]\ndate = 2026-11-22\nspotted = 3\non-demand = {a = 1}', "unknown key ours.spotted: a price list has date, source"),
        ("[ours]\ndate = 2026-11-22", r"ours has no price: add one below \[ours.on-demand\]"),
        ('[ours]\ndate = 2026-11-22\nregions = "us"\non-demand = {a = 1}', "ours.regions is 'us': write a list of names"),
        ("[ours]\ndate = 2026-11-22\nregions = [1]\nspot = {a = 1}", "ours.regions.0 is 1: write a list of names"),
        ("[ours]\ndate = 2026-11-22\nsource = 3\nspot = {a = 1}", "ours.source is 3: write where the prices come from"),
        ("[ours]\ndate = 2026-11-22\non-demand = 3", "ours.on-demand is 3: write US dollars per hour for each"),
        ("[ours]\ndate = 2026-11-22\non-demand = {a = '1'}", "ours.on-demand.a is '1': write US dollars per hour"),
        ("[ours]\ndate = 2026-11-22\nspot = {a = -1}", "ours.spot.a is -1: write US dollars per hour"),
        ("[ours]\ndate = 2026-11-22\nspot = {a = nan}", "ours.spot.a is nan: write US dollars per hour"),
        ("[ours]\ndate = 2026-11-22\nspot = {a = inf}", "ours.spot.a is inf: write US dollars per hour"),
        ("[ours]\ndate = 2026-11-22\nspot = {a = true}", "ours.spot.a is true: write US dollars per hour"),
        ("[ours]\ndate = 2026-11-22\n[ours.spot]\ng6.xlarge = 1", "ours.spot.g6 is a table: put machine types that contain a dot"),
        ("[ours]\ndate = 2026-11-22\nspot = {a = 'x', b = 'y'}", r"ours.spot.a is 'x': .* \(and 1 more\)$"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_in_one_sentence_with_its_key(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(SpecError, match=sentence) as caught:
        load_prices(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("written", "date"), [("2026", "2026"), ('"2026-11"', "2026-11"), ("2026-11-22", "2026-11-22")]
)
def test_a_date_may_be_a_year_a_month_or_a_day(tmp_path: Path, written: str, date: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(f"[ours]\ndate = {written}\nspot = {{a = 1}}\n")
    assert load_prices(path).lists[0].date == date


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none\.toml cannot be read"):
        load_prices(tmp_path / "none.toml")


def test_a_mean_price_is_weighted_by_time() -> None:
    assert mean_price([(50, 1.0), (150, 4.0)], 100, 200) == pytest.approx(2.5)
    assert mean_price([(150, 4.0), (50, 1.0)], 100, 200) == pytest.approx(2.5)
    assert mean_price([(120, 3.0), (500, 9.0)], 100, 200) == pytest.approx(3.0)


@given(
    st.lists(st.tuples(st.floats(0, 1000), st.floats(0, 10)), min_size=1, max_size=9),
    st.floats(0, 900),
    st.floats(0.1, 100),
)
def test_a_mean_price_lies_between_the_prices(changes: list[tuple[float, float]], began: float, span: float) -> None:
    mean = mean_price(changes, began, began + span)
    assert min(price for _, price in changes) - 1e-9 <= mean <= max(price for _, price in changes) + 1e-9


@dataclass
class Ec2:
    """Server that answers DescribeSpotPriceHistory in XML like EC2, with one row per page."""

    rows: list[tuple[str, str, float, float]] = field(default_factory=list)
    """Tuples (type, zone, seconds since the epoch, price)."""
    asked: list[dict[str, str]] = field(default_factory=list)
    refuses: bool = False

    def answer(self, query: dict[str, str]) -> tuple[int, str]:
        self.asked.append(query)
        if self.refuses:
            return 403, (
                "<Response><Errors><Error><Code>UnauthorizedOperation</Code><Message>You are not authorized.</Message></Error></Errors>"
                "<RequestID>0</RequestID></Response>"
            )
        wanted = [value for name, value in query.items() if name.startswith("InstanceType.")]
        rows = [row for row in self.rows if row[0] in wanted]
        place = int(query.get("NextToken") or 0)
        items = "".join(
            f"<item><instanceType>{kind}</instanceType><productDescription>Linux/UNIX</productDescription>"
            f"<spotPrice>{price:.6f}</spotPrice><timestamp>{stamp(when)}</timestamp><availabilityZone>{zone}</availabilityZone></item>"
            for kind, zone, when, price in rows[place : place + 1]
        )
        token = f"<nextToken>{place + 1}</nextToken>" if place + 1 < len(rows) else "<nextToken/>"
        space = "http://ec2.amazonaws.com/doc/2016-11-15/"
        return 200, (
            f'<DescribeSpotPriceHistoryResponse xmlns="{space}"><requestId>0</requestId>'
            f"<spotPriceHistorySet>{items}</spotPriceHistorySet>{token}</DescribeSpotPriceHistoryResponse>"
        )


def stamp(when: float) -> str:
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ec2]:
    ec2 = Ec2()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            status, text = ec2.answer({name: values[0] for name, values in parse_qs(body).items()})
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_REGION", raising=False)
    yield ec2
    server.shutdown()
    server.server_close()


def group(*machines: Machine, time: float = BEGAN) -> GroupEvent:
    labels = [
        {"machine": machine.type, "market": machine.market, "region": machine.region, "zone": machine.zone}
        for machine in machines
    ]
    places: Any = [{name: value for name, value in place.items() if value} for place in labels]
    return GroupEvent(tuple(places), time=time)


def test_spot_prices_of_a_run_are_means_over_its_time_in_its_zone(ec2: Ec2) -> None:
    ec2.rows = [
        ("g6.xlarge", "us-west-2a", BEGAN - 500, 0.4),
        ("g6.xlarge", "us-west-2a", BEGAN + 900, 0.8),
        ("g6.xlarge", "us-west-2b", BEGAN - 500, 0.2),
        ("g5.xlarge", "us-west-2b", BEGAN - 500, 0.9),
    ]
    anywhere, other = Machine("g6.xlarge", "spot", "us-west-2"), Machine("g5.xlarge", "spot", "us-west-2", "us-west-2a")
    events = [group(G6_A, anywhere, other, Machine("g6.xlarge", "on-demand")), EndEvent(time=BEGAN + 3600)]
    prices = with_aws_history(load_prices(), events)
    assert prices.seen == pytest.approx({G6_A: 0.7, anywhere: 0.45})
    quote = prices.quote(G6_A, "spot")
    assert quote
    assert quote.title == AWS_TITLE
    assert hourly(prices, "g6.xlarge", "on-demand") == 0.8048
    assert prices.quote(other, "spot") == load_prices().quote(other, "spot")
    assert prices.notes == (
        "AWS has no spot price of g5.xlarge for the time of the run, so the price lists are used for it",
    )
    first = ec2.asked[0]
    assert (first["ProductDescription.1"], first["StartTime"], first["EndTime"]) == (
        "Linux/UNIX", stamp(BEGAN)[:-5] + "Z", stamp(BEGAN + 3600)[:-5] + "Z"
    )  # fmt: skip
    assert len(ec2.asked) == 4  # pages


def test_if_aws_refuses_the_lists_are_used_and_a_note_is_added(ec2: Ec2) -> None:
    ec2.refuses = True
    prices = with_aws_history(load_prices(), [group(G6_A), EndEvent(time=BEGAN + 60)])
    assert hourly(prices, "g6.xlarge", "spot") == 0.4307
    (note,) = prices.notes
    assert "not authorized" in note
    assert "ec2:DescribeSpotPriceHistory" in note


def test_without_credentials_or_a_region_a_note_is_added(
    ec2: Ec2, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    (note,) = with_aws_history(load_prices(), [group(Machine("g6.xlarge", "spot"))]).notes
    assert "You must specify a region" in note
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    (note,) = with_aws_history(load_prices(), [group(G6_A)]).notes
    assert "Unable to locate credentials" in note
    assert not ec2.asked


def test_only_prices_of_aws_spot_machines_are_requested_from_aws(ec2: Ec2) -> None:
    events = [group(Machine("a2-highgpu-1g", "spot"), Machine("g6.xlarge", "on-demand"), Machine(None, None))]
    assert with_aws_history(load_prices(), events) == load_prices()
    assert with_aws_history(load_prices(), []) == load_prices()
    assert not ec2.asked


@pytest.mark.parametrize(
    ("machine", "region"),
    [
        (Machine("g6.xlarge", "spot", None, "us-west-2-lax-1a"), "us-west-2"),
        (Machine("g6.xlarge", "spot", None, "us-gov-west-1b"), "us-gov-west-1"),
        (Machine("g6.xlarge", "spot", "eu-west-1", None), "eu-west-1"),
    ],
)
def test_the_region_of_a_zone_is_known(
    ec2: Ec2, machine: Machine, region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr("undula.cluster.prices.spot_history", lambda region, *_: asked.append(region) or {machine: 1.0})
    assert with_aws_history(load_prices(), [group(machine)]).seen == {machine: 1.0}
    assert asked == [region]


def test_the_answer_of_motos_server_is_read(s3: object) -> None:
    """Moto has one price for all types, from 2006."""
    seen = spot_history("us-west-2", {G6_A, Machine("m9.huge", "spot", "us-west-2")}, BEGAN, BEGAN + 3600)
    assert seen == {G6_A: pytest.approx(1e-5)}
