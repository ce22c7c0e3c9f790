"""Decides what is a secret, for everything that a job writes or shows. In place of a secret stands a digest, which shows changes of it."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import yaml

ROUNDS = 20_000
"""Rounds of PBKDF2 for a digest. They take 10 ms, which makes it slow to guess a short secret from its digest."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ADDITIONS = frozenset({"base", "base64", "b", "hex", "string", "str", "text", "raw", "plain", "old", "new", "current"})
"""Words after which a name still names the secret itself, as in `secret_key_base`. A `password_file` does not."""
_SECRETS = frozenset(
    ("password", "passwd", "passphrase", "passcode", "pwd", "secret", "credential", "cred", "mnemonic", "apikey")
)
"""Last words of names of secrets, whatever stands before them."""
_TEXTS = frozenset({"dsn", "jwt", "auth", "authorization", "bearer", "cookie", "webhook"})
"""Last words of names of secrets if their value is text."""
_KEYS = re.compile(
    r"access|account|admin|aes|anthropic|api|app|auth|aws|azure|client|cohere|comet|deploy|encryption|decryption|gcp|gpg|hf|hmac|"
    r"huggingface|jwt|license|master|mistral|neptune|openai|pgp|private|root|rsa|s3|secret|security|service|session|shared|signing|"
    r"ssh|storage|subscription|symmetric|wandb|webhook"
)
"""Words that make a key a secret if they stand before it. A `sort_key` is none."""
_IDENTIFIED_KEYS = frozenset({"api", "access", "secret"})
"""Words before a key whose id and value are secrets too, as in `access_key_id`."""
_VOCABULARY = re.compile(
    r"audio|begin|beginning|bos|blank|boi|char|class|cls|control|dummy|empty|end|eod|eoi|eom|eos|eot|fim|first|forced|image|infill|"
    r"input|label|last|learned|mask|masked|max|max|middle|min|newline|next|null|num|oov|output|pad|padding|per|placeholder|"
    r"position|prefix|prompt|query|register|sentence|sep|separator|soft|space|special|speech|start|stop|suffix|text|time|unk|"
    r"unknown|video|virtual|vision|whitespace|word"
)
"""Words that make a token one of a vocabulary if they stand before it. Any other token lets its owner in."""
_TOKENS = re.compile(r"access|api|auth|bearer|github|gitlab|hf|huggingface|id|refresh|secret|session|slack|wandb")
"""Words that make `tokens` secrets if they stand before it. Other tokens are counted."""
_ADDRESSES = re.compile(
    r"(database|db|connection|conn|webhook|sas|signed|presigned)(ur[il]|string|str)$|^(seedphrase)$|"
    r"(api|access|secret|private|signing|encryption|account)keys?$|(github|gitlab|git|azure)pat$|"
    r"^(db|database|user|admin|root|smtp|mysql|redis|postgres|ftp|mail)?pass$"
)
"""Names of secrets in which words may be joined."""
_VALUES = re.compile(
    r"://[^/\s:@]*:[^/\s@]+@|\b(A[KS]IA|AIza)[\w-]{12,}|-----BEGIN [A-Z ]*PRIVATE KEY-----|\b(gh[pousr]|hf|glpat|github_pat)[_-]\w{16,}"
    r"|\bsk-[\w-]{16,}|\bxox[abeprs]-[\w-]{8,}|\beyJ[\w-]{8,}\.[\w-]{8,}\.|\b(Bearer|Basic) +[\w+/.~=-]{8,}"
    r"|[?&](X-Amz-(Signature|Credential|Security-Token)|sig|Signature)="
)
"""Values that are secrets whatever their name: passwords in URLs, keys of known forms, private keys, signed URLs, and headers."""
_ASSIGNMENT = re.compile(r"(?<![\w$/.])-{0,2}([A-Za-z][\w.-]*)(?:=|: )(?=[\"']?(?![\"'$(<{]|~/)([\w+/.!@#%^~-]{4,}))")
"""A name and its value in a text, such as a command. A value that the shell looks up is no value. The value of one name can be the next
name, as in `ValueError: password=...`."""
_SPACED = re.compile(r"(?i)\baws_secret_access_key[\s=:]+[\"']?[\w+/]{8}")
_REFERENCE = re.compile(r"\$\{\w+\}|\(hidden\b[^)]*\)")
_BRACKETS = re.compile(r"<.*>|\[.*\]|\{.*\}|\s*", re.DOTALL)


def hide_secrets(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a tree in which digests stand in place of secrets. What is hidden already stays as it is."""
    return {str(key): _shown(str(key), value) for key, value in tree.items()}


def is_secret(name: str, value: object) -> bool:
    """Return whether a text or a number is a secret, by its name and its form. A dotted key counts as its last part."""
    if value is None or isinstance(value, bool) or value == "":
        return False
    if not isinstance(value, str):
        return isinstance(value, int | float) and _ends_in_secret(_words(name))
    if _REFERENCE.fullmatch(value):
        return False
    return _names_secret(_words(name), value) or holds_secret(value)


def holds_secret(text: str) -> bool:
    """Return whether a text contains a secret, such as a command with a password. One that the command reads elsewhere does not count."""
    if _VALUES.search(text) or _SPACED.search(text):
        return True
    return any(_names_secret(_words(match[1]), match[2]) for match in _ASSIGNMENT.finditer(text))


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


def _shown(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        tree = {str(key): _shown(str(key), item) for key, item in value.items()}
        return _all_hidden(name, tree) if _ends_in_secret(_words(name)) else tree
    if isinstance(value, list | tuple):
        return [_shown(name, item) for item in value]
    return _digest(name.rpartition(".")[2], json.dumps(value)) if is_secret(name, value) else value


def _all_hidden(name: str, value: Any) -> Any:
    """Return a tree with digests in place of all texts, because its name says that they are secrets."""
    if isinstance(value, Mapping):
        return {key: _all_hidden(name, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_all_hidden(name, item) for item in value]
    return _shown(name, value) if isinstance(value, str) else value


@lru_cache(maxsize=256)
def _digest(name: str, text: str) -> str:
    found = hashlib.pbkdf2_hmac("sha256", text.encode(), f"undula {name}".encode(), ROUNDS, 6)
    return f"(hidden, digest {found.hex()})"


def _names_secret(words: Sequence[str], text: str) -> bool:
    if not words:
        return False
    *before, last = words
    joined = "".join(words)
    if _ends_in_secret(words) or last in _TEXTS or _ADDRESSES.search(joined):
        return True
    if last in ("key", "keys"):
        return bool(before) and _KEYS.fullmatch(before[-1]) is not None
    if last in ("id", "value") and before[-1:] == ["key"]:
        return before[-2:-1] != [] and before[-2] in _IDENTIFIED_KEYS
    if last == "tokens":
        return bool(any(map(_TOKENS.fullmatch, before)))
    if last.endswith("token"):
        kinds = (*before, last.removesuffix("token"))
        return not (any(map(_VOCABULARY.fullmatch, kinds)) or _BRACKETS.fullmatch(text))
    return False


def _ends_in_secret(words: Sequence[str]) -> bool:
    return bool(words) and words[-1].removesuffix("s").endswith(tuple(_SECRETS))


def _words(name: str) -> list[str]:
    """Return the words of a name's last part, such as `client` and `secret` for `clientSecret`, without what may follow a secret's name."""
    words = [word.lower() for word in _WORD.findall(name.rpartition(".")[2])]
    while len(words) > 1 and (words[-1].isdigit() or words[-1] in _ADDITIONS):
        words.pop()
    return words
