"""Hides the secrets in the settings of a job. In place of a secret stands a digest, which shows changes of it.

What a secret is, `undula.masking` decides: a value that the user has declared, a name, or a shape.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import yaml

from undula.masking.shapes import is_secret, secrets_in
from undula.masking.values import holds_declared

ROUNDS = 20_000
"""Rounds of PBKDF2 for a digest. They take 10 ms, which makes it slow to guess a short secret from its digest."""
_NO_DIGEST = "(hidden)"


def hide_secrets(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a tree in which digests stand in place of secrets. What is hidden already stays as it is."""
    return {str(key): _shown(str(key), value) for key, value in tree.items()}


def has_secret(override: str) -> bool:
    """Return whether an override `key.sub=value` sets a secret."""
    key, _, text = override.partition("=")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    tree = {key: value}
    return _is_hidden(key, text) or hide_secrets(tree) != tree


def same_value(one: object, other: object) -> bool:
    """Return whether two shown values are equal as far as is known. Former versions hid secrets without a digest."""
    return one == other or _NO_DIGEST in (one, other)


def _shown(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _shown(f"{key}.{name}", item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        options = ("", *value)  # an option of a command may stand before its value
        return [
            _digest(key, item) if _is_of_option(option, item) else _shown(key, item)
            for option, item in zip(options, value, strict=False)
        ]
    return _digest(key, value) if _is_hidden(key, value) else value


def _is_of_option(option: object, value: object) -> bool:
    return isinstance(option, str) and option.startswith("--") and is_secret(option.strip("-"), value)


def _is_hidden(key: str, value: object) -> bool:
    if isinstance(value, str) and (holds_declared(value) or any(secrets_in(value, key))):
        return True
    return is_secret(key, value)


def _digest(key: str, value: object) -> str:
    return _digest_of(key.rpartition(".")[2], json.dumps(value))


@lru_cache(maxsize=256)
def _digest_of(name: str, text: str) -> str:
    digest = hashlib.pbkdf2_hmac("sha256", text.encode(), f"undula {name}".encode(), ROUNDS, 6)
    return f"(hidden, digest {digest.hex()})"
