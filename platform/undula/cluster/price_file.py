"""Schema of a price file in TOML, and the messages for invalid files."""

import tomllib
from datetime import date
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import ErrorDetails

from undula.errors import SpecError
from undula.plan.prices import PriceList

EXAMPLE = '"g6.xlarge" = 0.8048'
PER_MACHINE = f"write US dollars per hour for each machine type, as {EXAMPLE}"
EXAMPLE_DATE = 'date = "2026-11-22"'
FIXES = {
    "date": f"write the date of the prices, as {EXAMPLE_DATE}",
    "source": 'write where the prices come from, as source = "https://..."',
    "regions": 'write a list of names, as regions = ["us-west-2"]',
    "on-demand": PER_MACHINE,
    "spot": PER_MACHINE,
}
"""Fix for each key of a price list."""

Text = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, date | int) else value)]
"""Text; a date or a number in TOML is converted to text."""
Hourly = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ListInFile(BaseModel):
    """One table of a price file."""

    model_config = ConfigDict(strict=True, extra="forbid")

    date: Text
    source: str = ""
    regions: list[str] = []
    on_demand: dict[str, Hourly] = Field(default={}, alias="on-demand")
    spot: dict[str, Hourly] = {}

    @model_validator(mode="after")
    def _has_a_price(self) -> "ListInFile":
        if not self.on_demand and not self.spot:
            raise ValueError("no price")
        return self

    def named(self, name: str) -> PriceList:
        """Return the content of the table as a price list with this name."""
        return PriceList(name, self.date, self.source, tuple(self.regions), self.on_demand, self.spot)


def parse_prices(text: str, file: str) -> tuple[PriceList, ...]:
    """Parse the price lists of a file, and return them in the order of the file.

    Args:
        text: Content of the file.
        file: Name of the file, for error messages.

    Raises:
        SpecError: The text is not TOML, or not a price file.
    """
    try:
        lists = TypeAdapter(dict[str, ListInFile]).validate_python(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{file} is not TOML: {error}") from None
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        more = f" (and {len(others)} more)" if others else ""
        raise SpecError(f"{file}: {_sentence(first)}{more}") from None
    return tuple(prices.named(name) for name, prices in lists.items())


def _sentence(error: ErrorDetails) -> str:
    """Return a sentence with the key, its problem and the fix."""
    name, *path = map(str, error["loc"])
    key, given = ".".join([name, *path]), error["input"]
    if error["type"] == "value_error":
        return f"{key} has no price: add one below [{name}.on-demand] or [{name}.spot], as {EXAMPLE}"
    if not path:
        return f"{key} is {_shown(given)}: write a table [{name}] with {EXAMPLE_DATE} and prices"
    if error["type"] == "extra_forbidden":
        return f"unknown key {key}: a price list has {', '.join(FIXES)}"
    if error["type"] == "missing":
        return f"{key} is missing: {FIXES[path[0]]}"
    if path[0] in ("on-demand", "spot") and path[1:] and isinstance(given, dict):
        return f"{key} is a table: put machine types that contain a dot in quotes, as {EXAMPLE}"
    return f"{key} is {_shown(given)}: {FIXES[path[0]]}"


def _shown(value: Any) -> str:
    """Return a value as TOML writes it, or its kind if it is a table."""
    if isinstance(value, dict):
        return "a table"
    return str(value).lower() if isinstance(value, bool) else repr(value)
