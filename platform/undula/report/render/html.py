"""HTML pages from Jinja templates. Text is escaped by default, and a page is one file that applies only its own style and script."""

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from undula.report.text import printable

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


def render_page(
    template: str, context: Mapping[str, object], *, package: str, script: str = "", more_style: str = ""
) -> str:
    """Render a page as HTML. Its Content-Security-Policy allows only the hashes of its own style and script.

    Args:
        template: Name of the template, which extends base.html.
        context: Variables of the template.
        package: Package whose folder `templates` has the template.
        script: Name of the page's script in that folder; empty for a page without a script.
        more_style: CSS of this page in addition to the shared stylesheet.
    """
    environment = _environment(package)
    style = _source(environment, "style.css") + more_style
    code = _source(environment, script) if script else ""
    page = environment.get_template(template)
    return page.render(
        context, style=Markup(style), style_hash=_hash(style), script=Markup(code), script_hash=_hash(code)
    )


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
