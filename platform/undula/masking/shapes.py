"""Secrets that nobody has declared, in any text: a safety net under those that the user has declared. They are known by tables of shapes,
here and in `tokens`, and by names in front of values. All patterns take linear time: what repeats is possessive, or has a limit."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from undula.masking.names import CORES, is_secret
from undula.masking.tokens import TOKEN, one_of

MASK = "***"
"""Text in place of a secret."""


class Shape(NamedTuple):
    """Shape of secrets in a text."""

    word: str
    """Word in lower case that a text contains, or it is not searched for the shape."""
    pattern: re.Pattern[str]
    """Pattern whose group is the secret."""


def _shape(word: str, *parts: str) -> Shape:
    return Shape(word, re.compile("".join(parts)))


_CREDENTIALS = r"{0,8}+(?=[^\s\d=]{0,200}+[\d=])([\w+/.~=-]{8,}+)"
_VALUE_OF_URL = r"=([^\s&\"'<>]++)"
_OPTION_P = r"-(?<=\s-)p(?![\d:.]++(?!\S))(?=[^\s\d]{0,100}+\d)([^\s\"'$=][^\s\"']{3,}+)"
SHAPES = (
    # The password of a URL, which may contain a @. Where no @ follows, the rest is skipped: no later URL in it could have one.
    _shape(
        "://",
        r"://[^\s/:@\"'\[]{0,200}+:(?!\d++(?:[/?#]|$)|\$\{)",
        r"(?:([^\s\"'<>@]++(?:@[^\s\"'<>@]*+(?=@))*+)@|[^\s\"'<>@]*+)",
    ),
    # A URL with a token.
    _shape("://", r"://(?:(?<=\bhttp://)|(?<=\bhttps://))(?!git@)([^/\s@$?#\"'<>:]{1,500}+)@"),
    _shape(
        "private",
        r"(-----BEGIN [A-Z\d ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?:[^-]++|-(?!----END))*+(?:-----END[A-Z\d ]{0,60}+-----)?)",
    ),
    _shape("hooks.slack", r"hooks\.slack\.com/(\w++/\S++)"),
    _shape("discord", r"discord(?:app)?\.com/api/webhooks/(\S++)"),
    _shape("webhook.office", r"webhook\.office\.com/(\S++)"),
    _shape("bearer", rf"[Bb]earer {_CREDENTIALS}"),
    _shape("basic", rf"[Bb]asic {_CREDENTIALS}"),
    _shape(
        "authorization",
        r"[Aa]uthorization\\?[\"']?(?::[ ]?|=)\\?[\"']?[A-Za-z][\w-]{0,20}+ {1,8}+(?=[^\s\d]{0,400}+\d)([\w+/.~=-]{8,}+)",
    ),
    _shape("sig", rf"[?&](?:X-(?:Amz|Goog)-Signature|sig|Signature){_VALUE_OF_URL}"),
    _shape("x-amz-", rf"[?&]X-Amz-(?:Credential|Security-Token){_VALUE_OF_URL}"),
    _shape("x-goog-", rf"[?&]X-Goog-Credential{_VALUE_OF_URL}"),
    _shape("curl", r"-(?<=\s-)(?:u|-user)[ =]?[\"']?[^\s:\"'$]{1,200}+:((?!\$|\d{1,6}+(?!\S))[^\s\"']++)"),
    _shape("mysql", _OPTION_P),
    _shape("mariadb", _OPTION_P),
    _shape("secret_access_key", r"[Ss](?i:ecret_access_key)[\s=:]++[\"']?([\w+/]{8,}+)"),
    _shape(
        "machine", r"machine\s++\S++\s++(?:(?:login|account)\s++\S++\s++){0,2}+password\s++(?=[^\s\d]{0,100}+\d)(\S++)"
    ),
    # A line of such a file. Words that follow make a sentence.
    _shape("passw", r"(?m:^)[ \t]{0,40}+passw(?:or)?d[ \t]{1,40}+((?=[^\s\d]{0,100}+\d)[^\s\"'()=]{6,}+)[ \t]*+(?m:$)"),
    _shape(":", r":(?<=\d{8}:)([\w-]{35})(?![\w-])"),  # a token of Telegram
    _shape("q~", r"(?<![\w~.-])([\w~.]{3}\dQ~[\w~.-]{31,34})(?![\w~.-])"),  # a secret of Azure AD
)
_RUN_OF_KEY = re.compile(r"[A-Za-z\d+/][A-Za-z\d+/]{63}")
"""Part of a text without which it has no line of a private key. Most texts have none, and this is found out fast."""
_LINE_OF_KEY = re.compile(
    r"(?<![\w+/=.-])(?=([A-Za-z\d+/]{64}(?:[A-Za-z\d+/]{6})?+)(?![\w+/=.-]))(?!(?:[A-Za-z\d+]*+/){6})"
    r"(?=(?:[a-z\d+/]*+[A-Z]){8})(?=(?:[A-Z\d+/]*+[a-z]){8})(?=(?:[A-Za-z+/]*+\d){3})"
)
"""A line of a private key, which is printed line by line. A path has more slashes."""

_MOST_CHARS = 200
"""Maximum number of characters of a value by which it is known."""
_MOST_NESTED = 2
"""Maximum number of assignments in a value, such as `key=password=...`, that are looked at."""
_RUN = r"[^\s\"'`,;&)}\]\\]"
"""Character of a value that is not quoted."""
_NO_PROSE = r"(?=\\?[\"']|[^\s\d]{0,200}+\d)"
"""A quote, or a digit in the next word: around such a sign words may stand."""
_SIGN = rf"\\?[\"']?(=|[ ]{{1,8}}+=[ ]{{1,8}}+{_NO_PROSE}|:[ ]{_NO_PROSE}|:(?=\\?[\"'])|>(?=[^\s<>]{{4,200}}+</))"
_NAME = r"([A-Za-z][\w.-]{0,120}+)"
_VARIABLE = r"(?=[A-Z][A-Z\d]{0,40}+_[A-Z\d_]{1,60}+ )"
_WORDS = rf"(?<=[\"'])(?=[^\d\"'\\\n]{{0,100}}+\d){_RUN}[^\"'\\\n]{{5,{_MOST_CHARS}}}+"
"""A value with blanks or commas, in quotes."""
_VALUE = rf"(?=(\\?[\"'])?((?![$({{\"'\\]|~/|<[^>\n]{{0,80}}+>)(?:{_RUN}{{4,{_MOST_CHARS}}}+|{_WORDS})))"
"""A value, which may be quoted. One that the shell looks up is none, and neither is a placeholder such as <password>."""


def _assignment(cores: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of a name and its value in a text, such as a command; a variable such as HF_TOKEN needs no sign.

    The value of one name may be the next name, as in `ValueError: password=...`, so the match ends before it.

    Args:
        cores: Words of which the name contains one; any name if there are none.
    """
    letters = re.sub("[a-z]", lambda letter: f"[{letter[0]}{letter[0].upper()}]", one_of(cores))
    core = rf"(?=[\w.-]{{0,120}}?(?:{letters}))" if cores else ""
    assigned = rf"-{{0,2}}(?={_NAME}{_SIGN}){core}\1\\?[\"']?\2{_VALUE}"
    flag = rf"(?:--(?!secrets? )|{_VARIABLE})(?={_NAME} ){core}\5 {{1,8}}+(?!-){_VALUE}"
    return re.compile(rf"(?<![\w$/.-])(?:{assigned}|{flag})")


_ANY, _LIKELY = _assignment(()), _assignment(CORES)
_REST = re.compile(rf"{_RUN}*+")
_CODE = re.compile(r"[a-zA-Z_]\w*+(?:\.[a-zA-Z_]\w*+)++(?:[\[(].*)?|\w*+[\[(].*")
"""A value that stands in code, as in the lines of a traceback."""


def secrets_in(text: str, key: str = "") -> Iterator[tuple[int, int]]:
    """Yield the first and the last position of each secret in a text, by the shapes and by the names of what the text assigns.

    Args:
        text: Any text.
        key: Dotted key of the text.
    """
    lower = text.lower()
    patterns = [pattern for word, pattern in SHAPES if word in lower]
    if _RUN_OF_KEY.search(text):
        patterns.append(_LINE_OF_KEY)
    for pattern in patterns:
        for match in pattern.finditer(text):
            if match.lastindex:
                yield match.span(match.lastindex)
    for match in TOKEN.finditer(text):
        yield match.span()
    if key or any(core in lower for core in CORES):
        yield from _assigned(text, key)


def _assigned(text: str, key: str) -> Iterator[tuple[int, int]]:
    """Yield the first and the last position of each value in a text that is a secret by its name."""
    pattern = _ANY if key else _LIKELY
    place, end, nested = 0, 0, 0
    while match := pattern.search(text, place):
        place, until = match.span(match.lastindex or 0)
        if found := _secret_of(match, key):
            yield found
            place = found[1]
        elif place < end:
            nested += 1
            place = until if nested == _MOST_NESTED else place
        else:
            end, nested = until, 0


def _secret_of(match: re.Match[str], key: str) -> tuple[int, int] | None:
    """Return the first and the last position of the value of an assignment if it is a secret."""
    option, sign, quote, value, flag, quote_of_flag, value_of_flag = match.groups()
    name, quote, value = option or flag, quote or quote_of_flag, value or value_of_flag
    begin, until = match.span(match.lastindex or 0)
    if sign == ">":
        value = value.partition("</")[0]
        return (begin, begin + len(value)) if is_secret(f"{key}.{name}", value) else None
    if quote and (end := match.string.find(quote, begin, begin + _MOST_CHARS)) >= 0:
        whole = match.string[begin:end]
        # Text with blanks may be prose, such as a message about a password.
        if "\n" not in whole and (" " not in whole or re.search(r"\d", whole)) and is_secret(f"{key}.{name}", whole):
            return begin, end
    if " " in value:
        return None
    # Where words may stand around a name, a value is quoted or has a digit. `token = batch_2` stands in code.
    may_be_prose = not quote and (sign != "=" if option else flag.isupper())
    if may_be_prose and (not re.search(r"\d", value) or ((sign or "").startswith(" ") and "_" in value)):
        return None
    if _CODE.fullmatch(value) or not is_secret(f"{key}.{name}", value):
        return None
    rest = _REST.match(match.string, until)
    return begin, rest.end() if rest else until
