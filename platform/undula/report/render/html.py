"""HTML pages from Jinja templates: escaped by default, complete in one file, and allowed to run nothing but their own style and script."""

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
    """A figure at the top of a page."""

    label: str
    value: str
    note: str
    """Explanation below the value."""


@dataclass(frozen=True)
class Share:
    """A segment of a bar that shows how a whole is divided."""

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
    """The segments of a bar, one for each amount; an amount below zero gets a segment of no size.

    Args:
        amounts: amounts by name.
        css: prefix of the CSS classes, which end with the name.
        labels: labels by name; an amount without a label is shown under its name.
        text: function that writes an amount.
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
    """A page as HTML. Its Content-Security-Policy names the hashes of its style and script, so that no others take effect.

    Args:
        template: name of the template, which extends base.html.
        context: variables of the template.
        package: package whose folder `templates` has the template.
        script: name of the page's script in that folder; empty for a page without a script.
        more_style: CSS of this page beside the shared stylesheet.
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
