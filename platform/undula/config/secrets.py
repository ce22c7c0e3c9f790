"""Decides what is a secret, for everything that a job writes or shows. In place of a secret stands a digest, which shows changes of it."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import yaml

ROUNDS = 20_000
"""Rounds of PBKDF2 for a digest. They take 10 ms, which makes it slow to guess a short secret from its digest."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ADDITIONS = re.compile(
    r"b|backup|base|base64|current|default|dev|development|eu|fallback|hex|live|main|new|old|plain|primary|prod|production|raw|sandbox|"
    r"secondary|stage|staging|str|string|test|text|us|v|\d+"
)
"""Words and numbers after which a name still names the secret itself, as in `secret_key_base`. A `password_file` does not."""
_SECRETS = ("password", "passwd", "passphrase", "passcode", "pwd", "secret", "credential", "mnemonic", "apikey", "otp")
"""Endings of the last words of names of secrets, whatever stands before them."""
_SHORT_SECRETS = frozenset({"cred", "creds"})
"""Last words of names of secrets that other words may end with, such as `sacred`."""
_TEXTS = frozenset({"dsn", "jwt", "auth", "authorization", "bearer", "cookie", "webhook"})
"""Last words of names of secrets if their value is text."""
_KEYS = re.compile(
    r"access|account|admin|aes|anthropic|api|app|auth|aws|azure|client|cohere|comet|deploy|encryption|decryption|gcp|gpg|hf|hmac|"
    r"hub|huggingface|jwt|license|logger|master|mistral|mlflow|neptune|openai|pgp|private|provider|root|rsa|s3|secret|security|sentry|"
    r"service|session|shared|signing|slack|ssh|storage|subscription|symmetric|telegram|tracker|tracking|wandb|webhook"
)
"""Words that make a key a secret if they stand before it, also as the name of its section. A `sort_key` is none."""
_IDENTIFIED_KEYS = frozenset({"api", "access", "secret"})
"""Words before a key whose id and value are secrets too, as in `access_key_id`."""
_VOCABULARY = re.compile(
    r"assistant|audio|begin|beginning|bos|blank|boi|call|char|class|cls|control|dummy|empty|end|eod|eoi|eom|eos|eot|fim|first|forced|"
    r"image|infill|input|label|last|learned|mask|masked|max|middle|min|newline|next|null|num|oov|output|pad|padding|per|placeholder|"
    r"position|prefix|prompt|query|register|role|sentence|sep|separator|soft|space|special|speech|start|stop|suffix|text|think|time|"
    r"turn|unk|unknown|video|virtual|vision|whitespace|word"
)
"""Words that make a token one of a vocabulary if they stand before it. Any other token lets its owner in."""
_SPECIAL_TOKENS = re.compile(r"bos|boi|cls|eod|eoi|eom|eos|eot|fim|mask|oov|pad|sep|unk")
"""Names of tokens of a vocabulary in a section such as `tokens`."""
_SPEAKERS = re.compile(r"human|system|tool|user")
"""Words that make a token one of a chat template if its value has characters that no token of a service has."""
_TOKEN_OF_SERVICE = re.compile(r"[\w.+/=~:-]+")
_COUNT = re.compile(r"\d{1,4}(\.\d+)?[kmbt]", re.IGNORECASE)
"""Numbers of tokens, such as 4k or 300B."""
_TOKENS = re.compile(r"access|api|auth|bearer|github|gitlab|hf|huggingface|id|refresh|secret|session|slack|wandb")
"""Words that make `tokens` secrets if they stand before it. Other tokens are counted."""
_ADDRESSES = re.compile(
    r"(database|db|connection|conn|webhook|sas|signed|presigned)(ur[il]|string|str)$|^(seedphrase)$|"
    r"(api|access|secret|private|signing|encryption|account)keys?$|(github|gitlab|git|azure)pat$|"
    r"^(db|database|user|admin|root|smtp|mysql|redis|postgres|ftp|mail)?pass$"
)
"""Names of secrets in which words may be joined."""
_PLAIN_WORDS = re.compile(r"none|null|nil|true|false|yes|no|on|off|enabled?|disabled?", re.IGNORECASE)
"""Values that are no secrets, whatever their name."""
_SETTINGS = re.compile(
    r"auto|backward|bpe|bytes?|chars?|characters?|default|forward|license|optional|required|sentencepiece|subwords?|unigram|wordpiece|"
    r"words?",
    re.IGNORECASE,
)
"""Values that are no secrets, unless their name leaves no doubt, as that of a password does."""
_VALUES = re.compile(
    r"://[^/\s:@]*:[^/\s@]+@|\bhttps?://(?!git@)[^/\s@$?#]+@|\b(A[KS]IA|AIza)[\w-]{12,}|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|\b(gh[pousr]|hf|glpat|github_pat)[_-]\w{16,}|\bsk-[\w-]{16,}|\bxox[abeprs]-[\w-]{8,}|\beyJ[\w-]{8,}\.[\w-]{8,}\."
    r"|(?<!\d)\d{8,10}:[\w-]{35}(?![\w-])|\bhooks\.slack\.com/\w+/\w|\bdiscord(app)?\.com/api/webhooks/\w"
    r"|\bwebhook\.office\.com/\w|\b(Bearer|Basic) +[\w+/.~=-]{8,}|[?&](X-Amz-(Signature|Credential|Security-Token)|sig|Signature)="
)
"""Values that are secrets whatever their name: passwords and tokens in URLs, keys of known forms, private keys, webhooks, signed URLs,
and headers."""
_ASSIGNMENT = re.compile(
    r"(?<![\w$/.])(?:-{0,2}([A-Za-z][\w.-]*)(?:=|: )|--([A-Za-z][\w-]*) +(?!-))"
    r"(?=[\"']?(?![\"'$(<{]|~/)([\w+/.!@#%^~-]{4,}))"
)
"""A name and its value in a text, such as a command. A value that the shell looks up is no value. The value of one name may be the next
name, as in `ValueError: password=...`."""
_SPACED = re.compile(r"(?i)\baws_secret_access_key[\s=:]+[\"']?[\w+/]{8}")
_REFERENCE = re.compile(r"\$\{\w+\}|\(hidden\b[^)]*\)")
_BRACKETS = re.compile(r"<.*>|\[.*\]|\{.*\}|\s*", re.DOTALL)


def hide_secrets(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a tree in which digests stand in place of secrets. What is hidden already stays as it is."""
    return {str(key): _shown(_path(str(key)), value) for key, value in tree.items()}


def is_secret(name: str, value: object) -> bool:
    """Return whether a text or a number is a secret, by its name and its form. The name is that of a leaf, or a dotted key."""
    return _is_secret(_path(name), value)


def holds_secret(text: str) -> bool:
    """Return whether a text contains a secret, such as a command with a password. One that the command reads elsewhere does not count."""
    return _holds_secret(text, ())


def has_secret(override: str) -> bool:
    """Return whether an override `key.sub=value` sets a secret."""
    key, _, text = override.partition("=")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    tree = {key: value}
    return is_secret(key, text) or hide_secrets(tree) != tree


def same_value(one: object, other: object) -> bool:
    """Return whether two shown values are equal as far as is known. Former versions hid secrets without a digest."""
    return one == other or _NO_DIGEST in (one, other)


_NO_DIGEST = "(hidden)"
_KeyPath: TypeAlias = tuple[str, ...]
"""Names of sections, and then the name of a leaf or a section in them."""


def _path(key: str) -> _KeyPath:
    return tuple(key.split("."))


def _shown(path: _KeyPath, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _shown((*path, *_path(str(key))), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        options = ("", *value)  # an option of a command may stand before its value
        return [
            _digest(path[-1], json.dumps(item)) if _is_of_option(option, item) else _shown(path, item)
            for option, item in zip(options, value, strict=False)
        ]
    return _digest(path[-1], json.dumps(value)) if _is_secret(path, value) else value


def _is_of_option(option: object, value: object) -> bool:
    return isinstance(option, str) and option.startswith("--") and is_secret(option, value)


@lru_cache(maxsize=256)
def _digest(name: str, text: str) -> str:
    digest = hashlib.pbkdf2_hmac("sha256", text.encode(), f"undula {name}".encode(), ROUNDS, 6)
    return f"(hidden, digest {digest.hex()})"


def _is_secret(path: _KeyPath, value: object) -> bool:
    if value is None or isinstance(value, bool) or value == "":
        return False
    if isinstance(value, str):
        return not _REFERENCE.fullmatch(value) and (
            _is_secret_by_name(path, value) or _is_in_secret_section(path, value) or _holds_secret(value, path)
        )
    return isinstance(value, int | float) and any(_ends_in_secret(_words(part)) for part in path)


def _is_secret_by_name(path: _KeyPath, text: str) -> bool:
    """Return whether a name says that its text is a secret, alone or together with the sections that it lies in."""
    return any(_names_secret(words, text) for words in _names(path))


def _is_in_secret_section(path: _KeyPath, text: str) -> bool:
    """Return whether a section has the name of a secret, as in `api_keys: {weather: ...}`. Then all of its texts are secrets."""
    kinds = _words(path[-1])
    for end in range(1, len(path)):
        for *before, last in _names(path[:end]):
            if last in ("key", "keys"):
                named = _names_secret((*before, last), text) or _names_secret((*kinds, last), text)
            elif last.endswith(("token", "tokens")):
                special = filter(_SPECIAL_TOKENS.fullmatch, kinds)
                named = _names_secret((*before, *special, last.removesuffix("s")), text) and not _COUNT.fullmatch(text)
            else:
                named = _names_secret((*before, last), text)
            if named:
                return True
    return False


def _holds_secret(text: str, path: _KeyPath) -> bool:
    if _VALUES.search(text) or _SPACED.search(text):
        return True
    assigned = ((_path(match[1] or match[2]), match[3]) for match in _ASSIGNMENT.finditer(text))
    return any(_is_secret_by_name((*path, *name), value) for name, value in assigned)


def _names_secret(words: Sequence[str], text: str) -> bool:
    *before, last = words
    if _PLAIN_WORDS.fullmatch(text):
        return False
    if _ends_in_secret(words):
        return True
    if _SETTINGS.fullmatch(text):
        return False
    if last.removesuffix("s") in _TEXTS or _ADDRESSES.search("".join(words)):
        return True
    if last in ("key", "keys"):
        return bool(before) and _KEYS.fullmatch(before[-1]) is not None
    if last in ("id", "value") and before[-1:] == ["key"]:
        return before[-2:-1] != [] and before[-2] in _IDENTIFIED_KEYS
    if last == "tokens":
        return any(map(_TOKENS.fullmatch, before)) and not _COUNT.fullmatch(text)
    if last.endswith("token"):
        return not _is_of_vocabulary((*before, last.removesuffix("token")), text)
    return False


def _is_of_vocabulary(kinds: Sequence[str], text: str) -> bool:
    """Return whether a token is one of a vocabulary or a chat template, by the words before it and its text."""
    if _BRACKETS.fullmatch(text) or any(map(_VOCABULARY.fullmatch, kinds)):
        return True
    return any(map(_SPEAKERS.fullmatch, kinds)) and not _TOKEN_OF_SERVICE.fullmatch(text)


def _ends_in_secret(words: Sequence[str]) -> bool:
    return bool(words) and (words[-1] in _SHORT_SECRETS or words[-1].removesuffix("s").endswith(_SECRETS))


def _names(path: _KeyPath) -> Iterator[tuple[str, ...]]:
    """Yield the words of a name, and those together with the names of ever more of the sections that it lies in."""
    *sections, name = path
    words = _words(name)
    if words:
        yield words
    for section in reversed(sections):
        if words and not all(map(_ADDITIONS.fullmatch, more := _words(section))):
            words = (*more, *words)
            yield words


@lru_cache(maxsize=4096)
def _words(name: str) -> tuple[str, ...]:
    """Return the words of a name, such as `client` and `secret` for `clientSecret`, without what may follow a secret's name."""
    words = [word.lower() for word in _WORD.findall(name)]
    while len(words) > 1 and _ADDITIONS.fullmatch(words[-1]):
        words.pop()
    return tuple(words)
