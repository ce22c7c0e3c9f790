"""HTML pages from Jinja templates. Text is escaped by default, and a page is one file that applies only its own style and script."""

import base64
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from undula.report.render.chart import Chart, Key, glyph_definitions
from undula.report.text import printable

FILE_WIDTH, FILE_HEIGHT, FILE_LEFT = 460, 345, 52
"""Size of a chart's file in pixels, and the room for the labels of its y axis."""
SHARED_PACKAGE = "undula.report.render"
"""Package with the templates that every page extends: base.html, macros.html and style.css."""


@dataclass(frozen=True)
class Tile:
    """Figure at the top of a page."""

    label: str
    value: str
    note: str
    """Explanation below the value."""


@dataclass(frozen=True)
class Share:
    """Segment of a bar that shows the parts of a whole."""

    css: str
    """CSS class that gives the segment its colour."""
    label: str
    amount: str
    start: float
    """Position of the segment on the bar, from 0 to 1."""
    size: float
    """Share of the whole, from 0 to 1."""


def shares_of(
    amounts: Mapping[str, float], css: str, labels: Mapping[str, str], text: Callable[[float], str]
) -> tuple[Share, ...]:
    """Return the segments of a bar, one for each amount. An amount below zero gets a segment of size 0.

    Args:
        amounts: Amounts by name.
        css: Prefix of the CSS classes, which end with the name.
        labels: Labels by name; an amount without a label is shown under its name.
        text: Function that formats an amount.
    """
    total = sum(amounts.values()) or 1.0
    shares, start = [], 0.0
    for name, amount in amounts.items():
        size = max(amount / total, 0.0)
        shares.append(Share(f"{css}{name}", labels.get(name, name), text(amount), start, size))
        start += size
    return tuple(shares)


def colors_css(colors: Mapping[str, tuple[str, str]]) -> str:
    """Return CSS classes by name that set a colour on a light and on a dark page."""
    light, dark = (
        "".join(f".{name} {{ color: {pair[scheme]}; }} " for name, pair in colors.items()) for scheme in (0, 1)
    )
    return f"\n{light}\n@media (prefers-color-scheme: dark) {{ {dark}}}\n"


def render_page(
    template: str, context: Mapping[str, object], *, package: str, script: str = "", more_style: str = ""
) -> str:
    """Render a page as HTML. Its Content-Security-Policy allows only the hashes of its own style and script.

    Args:
        template: Name of the template, which extends base.html.
        context: Variables of the template.
        package: Package whose folder `templates` has the template.
        script: Name of the page's script in that folder; empty for a page without a script.
        more_style: CSS of this page in addition to the shared stylesheets.
    """
    environment = _environment(package)
    style = _source(environment, "chart.css") + _source(environment, "style.css") + more_style
    code = _source(environment, script) if script else ""
    page = environment.get_template(template)
    markup = {"style": Markup(style), "script": Markup(code), "glyphs": glyph_definitions()}
    return page.render(context, **markup, style_hash=_hash(style), script_hash=_hash(code))


def render_chart(chart: Chart, more_style: str) -> str:
    """Render a chart as an SVG file of its own, with the colours of a light page.

    Args:
        chart: The chart.
        more_style: CSS in addition to chart.css.
    """
    environment = _environment(SHARED_PACKAGE)
    light = dict(re.findall(r"--(\w+): (#\w+);", _source(environment, "style.css").partition("@media")[0]))
    style = re.sub(r"var\(--(\w+)\)", lambda name: light[name[1]], _source(environment, "chart.css"))
    legend, top = _legend_rows(chart.keys, 24 if chart.legend else 6)
    size = FILE_WIDTH - FILE_LEFT - 14.0, FILE_HEIGHT - top - 66.0
    return environment.get_template("chart.svg").render(
        chart=chart, legend=legend, left=FILE_LEFT, top=top + 28, size=size, plot=chart.plot(size),
        width=FILE_WIDTH, height=FILE_HEIGHT, style=Markup(style + more_style), glyphs=glyph_definitions(),
    )  # fmt: skip


def _legend_rows(keys: Iterable[Key], top: float) -> tuple[list[tuple[float, float, Key]], float]:
    """Return the entries of a legend with their positions in a file, in rows that fill its width, and the end of the rows."""
    placed: list[tuple[float, float, Key]] = []
    x, y = float(FILE_LEFT), top
    for key in keys:
        width = 38 + 6.3 * len(key.label)
        if placed and x + width > FILE_WIDTH:
            x, y = float(FILE_LEFT), y + 18
        placed.append((x, y, key))
        x += width
    return placed, y + 18


@cache
def _environment(package: str) -> Environment:
    loaders = [PackageLoader(name) for name in dict.fromkeys((package, SHARED_PACKAGE))]
    environment = Environment(
        loader=ChoiceLoader(loaders), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["printable"] = printable
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment


def _source(environment: Environment, name: str) -> str:
    assert environment.loader is not None
    text, _, _ = environment.loader.get_source(environment, name)
    return text


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}"
