"""The secrets that the user has declared, and the mask for texts.

A process keeps the values of its secrets, so a script may delete the variables that have them.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from urllib.parse import quote, quote_plus

from undula.masking.shapes import MASK, secrets_in

NAMES = "UNDULA_SECRETS"
"""Environment variable of a job's processes with the names of the variables that are secrets, as a JSON list."""
MIN_CHARS = 6
"""Minimum number of characters of a value that is masked. Shorter ones, such as `true` or `1`, stand in many texts by chance."""
MIN_DIFFERENT_CHARS = 3
"""Minimum number of different characters of such a value. A line of dashes has one."""
_TEXTS = (str, list, dict)
_COLOUR = re.compile(r"\x1b\[[\d;:]*[mK]")
"""Sequence with which a terminal changes the colour of a text, or with which it erases the rest of a line, as grep does beside colours."""
_variables: dict[str, str] = {}
_values: frozenset[str] = frozenset()
_pattern: re.Pattern[str] | None = None


def declare(variables: Mapping[str, str]) -> None:
    """Mask the values of these variables from now on, and note their names for processes that inherit the variables."""
    global _values, _pattern
    if not variables:
        return
    _variables.update(variables)
    os.environ[NAMES] = with_declared(os.environ, variables)[NAMES]
    _values |= {form for value in variables.values() for form in forms_of(value)}
    longest_first = map(re.escape, sorted(_values, key=len, reverse=True))
    _pattern = re.compile("|".join(longest_first)) if _values else None


def declared() -> dict[str, str]:
    """Return the variables that are secrets in this process, also those that its script has deleted since."""
    return dict(_variables)


def declared_in(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that are secrets."""
    return {name: environment[name] for name in json.loads(environment.get(NAMES, "[]")) if name in environment}


def with_declared(environment: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with further variables, and the note that these are secrets."""
    names = {*variables, *json.loads(environment.get(NAMES, "[]"))}
    return {**environment, **variables, **({NAMES: json.dumps(sorted(names))} if names else {})}


def forms_of(value: str) -> set[str]:
    """Return the texts, each within a line, that show a secret: itself, its lines, and how URLs, JSON and Python write it."""
    lines = {line.strip() for line in value.splitlines()}
    whole = value.strip()
    forms = {*lines, " ".join(whole.split())}
    for text in {*lines, whole}:
        forms |= {quote(text), quote(text, safe=""), quote_plus(text), repr(text)[1:-1]}
        forms |= {json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}
    return {form for form in forms if len(form) >= MIN_CHARS and len(set(form)) >= MIN_DIFFERENT_CHARS}


def mask(text: str) -> str:
    """Return a text with *** in place of declared secrets, and of what has the shape of a secret, also if its colour changes within it."""
    places = _without_colours(text)
    plain = "".join(text[place] for place in places) if len(places) < len(text) else text
    found = [match.span() for match in _pattern.finditer(plain)] if _pattern else []
    shown, end = "", 0
    for begin, until in sorted([*found, *secrets_in(plain)]):
        first, last = places[begin], places[until - 1]
        if first >= end:
            shown += text[end:first] + MASK
        shown += "".join(_COLOUR.findall(text[max(end, first) : last + 1]))
        end = max(end, last + 1)
    return shown + text[end:]


def _without_colours(text: str) -> Sequence[int]:
    """Return the places of the characters of a text that are no part of a colour."""
    colours = [match.span() for match in _COLOUR.finditer(text)] if "\x1b" in text else []
    if not colours:
        return range(len(text))
    ends, begins = [0, *(end for _, end in colours)], [*(begin for begin, _ in colours), len(text)]
    return [*chain(*map(range, ends, begins))]


def masked(tree: object) -> object:
    """Return a copy of a tree of plain values in which all texts are masked."""
    if isinstance(tree, Mapping):
        return {key: masked(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [masked(value) for value in tree]
    return mask(tree) if isinstance(tree, str) else tree


def mask_error(error: BaseException | None) -> None:
    """Mask the texts of an exception and of those that it follows from, before it leaves this process."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.args = tuple(masked(part) if isinstance(part, _TEXTS) else part for part in error.args)
        for name in (
            "filename",
            "strerror",
            *vars(error),
        ):  # the first two are those of an OSError, which does not show its arguments
            if isinstance(value := getattr(error, name, None), _TEXTS):
                setattr(error, name, masked(value))
        error = error.__cause__ or error.__context__


def holds_declared(text: str) -> bool:
    """Return whether a text contains a declared secret."""
    return _pattern is not None and _pattern.search(text) is not None


def length_of_beginning(text: str) -> int:
    """Return the length of the end of a text with which a declared secret may begin."""
    longest = max(map(len, _values), default=1)
    ends = (text[-count:] for count in range(min(longest - 1, len(text)), 0, -1))
    return next((len(end) for end in ends if any(value.startswith(end) for value in _values)), 0)
