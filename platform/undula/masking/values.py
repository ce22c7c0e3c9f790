"""The secrets that the user has declared, and the mask for texts.

A process keeps the values of its secrets, so a script may delete the variables that have them.
"""

import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate, chain
from urllib.parse import quote, quote_plus

from undula.masking.shapes import MASK, secrets_in

NAMES = "UNDULA_SECRETS"
"""Environment variable of a job's processes with the names of the variables that are secrets, as a JSON list."""
MIN_CHARS = 6
"""Minimum number of characters of a value that is masked. Shorter ones, such as `true` or `1`, stand in many texts by chance."""
MIN_DIFFERENT_CHARS = 3
"""Minimum number of different characters of such a value. A line of dashes has one."""
_COLOUR = re.compile(r"\x1b\[[\d;:]*[mK]")
"""Sequence with which a terminal changes the colour of a text, or with which it erases the rest of a line, as grep does beside colours."""
_BEGUN_COLOUR = re.compile(r"\x1b(?:\[[\d;:]*)?\Z")
"""Beginning of such a sequence at the end of a text."""
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
    return mask_part(text, 0, len(text))[0]


def mask_part(text: str, begin: int, until: int, is_open: bool = False) -> tuple[str, bool]:
    """Return a part of a text, masked with regard to what is before and after it, and whether a secret reaches the end of the part.

    Args:
        text: Any text.
        begin: First position of the part.
        until: Position after the part.
        is_open: Whether the text before the part has been shown with *** at its end, which a secret that goes on does not need again.
    """
    pieces, end = [], begin
    has_colours = "\x1b" in text
    for first, last in sorted(_secrets(text)):
        if last <= end or first >= until:
            continue
        if first >= end or (end == begin and not is_open):
            pieces += [text[end : max(first, end)], MASK]
        last = min(last, until)
        pieces += _COLOUR.findall(text, max(first, end), last) if has_colours else []
        end = last
        is_open = False
    return "".join([*pieces, text[end:until]]), end == until > begin


def _secrets(text: str) -> Iterator[tuple[int, int]]:
    """Yield the first and the last position of each secret in a text."""
    plain, place = _without_colours(text)
    for begin, until in chain(_places(plain), secrets_in(plain)):
        yield place(begin), place(until - 1) + 1


def _places(text: str) -> Iterator[tuple[int, int]]:
    """Yield the first and the last position of each declared secret in a text. Two may overlap, as `abcab` does in `abcabcab`."""
    pattern = _pattern
    found = pattern.search(text) if pattern else None
    while pattern and found:
        yield found.span()
        found = pattern.search(text, found.start() + 1)


def _without_colours(text: str) -> tuple[str, Callable[[int], int]]:
    """Return a text without its colours, and a function that returns the place in the text of a character that is no part of a colour."""
    if "\x1b" not in text:
        return text, lambda place: place

    @cache
    def colours() -> tuple[Sequence[int], Sequence[int]]:
        """Return the places of the colours in the text without them, and their total length up to each place."""
        spans = [match.span() for match in _COLOUR.finditer(text)]
        lengths = [0, *accumulate(end - begin for begin, end in spans)]
        return [begin - before for (begin, _), before in zip(spans, lengths, strict=False)], lengths

    def place_in_text(place: int) -> int:
        places, lengths = colours()
        return place + lengths[bisect_right(places, place)]

    return _COLOUR.sub("", text), place_in_text


def masked(tree: object) -> object:
    """Return a copy of a tree of plain values in which all texts are masked."""
    if isinstance(tree, Mapping):
        return {key: masked(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [masked(value) for value in tree]
    return mask(tree) if isinstance(tree, str) else tree


def holds_declared(text: str) -> bool:
    """Return whether a text contains a declared secret."""
    return _pattern is not None and _pattern.search(text) is not None


def length_to_show(text: str) -> int:
    """Return the length of the beginning of a text that may be shown masked before the rest of its line is known.

    The end is kept back from where a declared secret may begin, and so is a complete secret that reaches into this end.
    """
    colour = _BEGUN_COLOUR.search(text)
    whole = text[: colour.start()] if colour else text
    plain, place = _without_colours(whole)
    end = len(plain) - max((_length_of_beginning(plain, value) for value in _values), default=0)
    for begin, until in sorted(_places(plain), reverse=True):
        if begin < end < until:
            end = begin
    return place(end) if end < len(plain) else len(whole)


def _length_of_beginning(text: str, value: str) -> int:
    """Return the length of the longest end of a text with which a value begins, but does not end."""
    place = text.find(value[0], max(len(text) - len(value) + 1, 0))
    while place >= 0 and not value.startswith(text[place:]):
        place = text.find(value[0], place + 1)
    return len(text) - place if place >= 0 else 0
