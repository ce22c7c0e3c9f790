"""Names that give a secret away, such as those of settings and of what a text assigns: a safety net under the secrets that the user has
declared."""

import re
from functools import lru_cache
from typing import NamedTuple

SERVICES = (
    r"access|account|admin|aes|anthropic|api|app|auth|aws|azure|bearer|client|cohere|comet|datadog|decryption|deepgram|"
    r"deepseek|deploy|elevenlabs|encryption|fireworks|gcp|gemini|git|github|gitlab|google|gpg|groq|hf|hmac|hub|"
    r"hugging_?face|jwt|kaggle|lang_?smith|license|logger|master|mistral|mlflow|neptune|ngc|nvidia|open_?ai|"
    r"open_?router|perplexity|pgp|pinecone|private|provider|refresh|replicate|roboflow|root|rsa|s3|secret|security|"
    r"sendgrid|sentry|serper|service|session|shared|signing|slack|ssh|stability|storage|stripe|subscription|symmetric|"
    r"tavily|telegram|together(?:_?ai)?|tracker|tracking|twilio|voyage|wandb|weaviate|web_?hook"
)
"""Words that make a key or a token a secret if they stand beside it, also as the name of its section. A `sort_key` is none."""


class Name(NamedTuple):
    """Names of secrets."""

    end: str
    """Pattern of the end of a dotted key with its sections, in lower case, such as `wandb.api_key`."""
    value: str
    """Pattern of the texts that are secrets under such a name."""
    has_numbers: bool = False
    """Whether a number is a secret, too."""


_TEXT = r"(?s:.+)"
_CREDENTIAL = r"(?![-+]?\d[\d.,_]{0,11}(?:e[-+]?\d+)?[a-z/%]{0,5}$)(?=[^a-z]*[a-z])(?=\D*\d)[^\s<>\[\]{}|]{8,}|[^\s<>\[\]{}|_]{20,}"
"""A text of a service, and no word, number or count, such as `char`, `1.2e+08` or `300B`."""
_RANDOM_WORD = r"(?:(?=[a-z]*+\d)(?=\d*+[a-z])[a-z\d]{16}|[\da-f]{8}(?:-[\da-f]{4}){3}-)"
_RANDOM = rf"(?=\D*+\d)[^a-z\d]*+(?:(?!{_RANDOM_WORD})[a-z\d]++[^a-z\d]++)*+{_RANDOM_WORD}(?s:.*)"
NAMES = (
    Name(
        r"[a-z]*(?:pass(?:word|wd|phrase|code)|secret|credential|mnemonic|apikey|otp)s?|creds?|seed_?phrase",
        _TEXT,
        True,
    ),
    Name(r"[a-z]*pwd|pw", r"(?![~.]?/)(?s:.+)"),  # `pwd` may be the working directory
    Name(rf"(?:{SERVICES})[._]?(?:key|token|pat)s?|(?:key|token)s?[._](?:{SERVICES})", _TEXT),
    Name(r"(?:api|access|secret)_key[._](?:id|value)", _TEXT),
    Name(r"(?:admin|database|db|ftp|mail|mysql|postgres|redis|root|smtp|user)_?pass", _TEXT),
    Name(r"[a-z]*tokens?|dsn|jwt|auth|authorization|bearer|cookies?|webhooks?|(?<![a-z]_)pass", _CREDENTIAL),
    Name(r"(?:database|db|conn|connection|webhook|sas|signed|presigned)[._]?(?:ur[il]|string|str)", _CREDENTIAL),
    Name(r"(?<!public[._])keys?", _RANDOM),
)
_ADDITIONS = re.compile(
    r"(?:[._](?:b|backup|base|base64|current|default|dev|development|eu|fallback|hex|live|main|new|old|plain|primary|prod|"
    r"production|raw|sandbox|secondary|stage|staging|str|string|test|text|us|v?\d+))+$"
    r"|\.(?:dev|live|main|prod|production|staging|test)(?=\.)"
)
"""Words after which a name still names the secret itself, as in `secret_key_base`, and sections between the words of a name. A
`password_file` is no password."""
_COMPILED = [(re.compile(rf"(?:^|[._])(?:{name.end})$"), re.compile(name.value, re.IGNORECASE)) for name in NAMES]
_VOCABULARY = re.compile(r"(?:^|[._])(?:special|bos|cls|eos|mask|pad|sep|unk|image|audio|video|vocab\w*)_?\w*tokens?\b")
"""Names of tokens that let nobody in."""
_SETTINGS = re.compile(
    r"none|null|nil|true|false|yes|no|on|off|enabled?|disabled?|auto|default|required|optional|missing"
    r"|\$\{[\w:.]+\}|\(hidden\b[^)]*\)|\*\*\*",
    re.IGNORECASE,
)
"""Texts that are no secrets under any name, among them references to secrets, and what stands in their place."""

CORES = (
    "pass", "secret", "cred", "mnemonic", "otp", "seed", "pw", "key", "token", "pat", "dsn", "jwt", "auth", "bearer",
    "cookie", "hook", "url", "uri", "str",
)  # fmt: skip
"""Words of which each name of a secret contains one, by which most other names are passed over fast."""
_BOUNDARY = re.compile(r"(?<=[a-z\d])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[^\w.]+")


def is_secret(key: str, value: object) -> bool:
    """Return whether a text or a number is a secret by its name, or by the name of a section that it lies in.

    Args:
        key: Dotted key.
        value: The value.
    """
    is_text = isinstance(value, str)
    if isinstance(value, bool) or not (is_text or isinstance(value, int | float)):
        return False
    words, forms = _forms_under(key)
    if not forms:
        return False
    text = str(value).strip()
    if not text or _SETTINGS.fullmatch(text) or text.lower() in words:
        return False
    return any((is_text or form.has_numbers) and form.value.fullmatch(text) for form in forms)


class _Form(NamedTuple):
    """Texts that are secrets under a name."""

    value: re.Pattern[str]
    has_numbers: bool


@lru_cache(maxsize=4096)
def _forms_under(key: str) -> tuple[frozenset[str], tuple[_Form, ...]]:
    """Return the words of a dotted key, and the forms of texts that are secrets under it."""
    words = _BOUNDARY.sub("_", key).lower()
    if _VOCABULARY.search(words):
        return frozenset(), ()
    parts = words.split(".")
    sections = [_ADDITIONS.sub("", ".".join(parts[:count])) for count in range(len(parts), 0, -1)]
    forms = [
        _Form(value, name.has_numbers)
        for section in sections
        for name, (end, value) in zip(NAMES, _COMPILED, strict=True)
        if end.search(section)
    ]
    return frozenset(re.split(r"[._]", words)), tuple(dict.fromkeys(forms))
