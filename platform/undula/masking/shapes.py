"""Names and shapes that give a secret away: a safety net under the secrets that the user has declared. Both are tables."""

import re
from collections.abc import Iterator
from typing import NamedTuple

MASK = "***"
"""Text in place of a secret."""
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
_RANDOM = r"(?s:.*)(?:(?<![a-z\d])(?=[a-z]*\d)(?=\d*[a-z])[a-z\d]{16,}|[\da-f]{8}(?:-[\da-f]{4}){3}-)(?s:.*)"
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

SHAPES = [
    re.compile(shape)
    for shape in (
        r"://[^\s/:@\"'\[]{0,200}:(?!\d+(?:[/?#]|$)|\$\{)([^\s\"'<>]{1,500})@",  # the password of a URL
        r"\bhttps?://(?!git@)([^/\s@$?#\"'<>:]{1,500})@",  # a URL with a token
        r"\b((?:A[KS]IA|AIza)[\w-]{12,})|\b((?:gh[pousr]|hf|npm|gsk)_[A-Za-z\d]{16,}|github_pat_\w{16,})",
        r"\b((?:glpat|nvapi|pypi)-[\w-]{16,}|ya29\.[\w-]{16,}|xox[abeprs]-[\w-]{8,})",
        r"\b(sk-(?=[\w-]*\d)[\w-]{16,}|[sr]k_live_\w{16,})",
        r"\b(eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)|(?<!\d)(\d{8,10}:[\w-]{35})(?![\w-])",  # tokens of JWT and Telegram
        r"(-----BEGIN [A-Z ]*PRIVATE KEY-----(?s:.*?)(?:-----END [A-Z ]*-----|\Z))",
        # A line of such a key, which is printed line by line. A path has more slashes.
        r"(?<![\w+/=.-])(?!(?:[A-Za-z\d+]*/){6})(?=(?:[a-z\d+/]*[A-Z]){8})(?=(?:[A-Z\d+/]*[a-z]){8})(?=(?:[A-Za-z+/]*\d){3})"
        r"([A-Za-z\d+/]{64}|[A-Za-z\d+/]{70})(?![\w+/=.-])",
        r"\bhooks\.slack\.com/(\w+/\S+)|\bdiscord(?:app)?\.com/api/webhooks/(\S+)|\bwebhook\.office\.com/(\S+)",
        r"\b(?:Bearer|Basic) +((?=\S*[\d=])[\w+/.~=-]{8,})",
        r"[?&](?:X-Amz-(?:Signature|Credential|Security-Token)|sig|Signature)=([^\s&\"'<>]+)",
        r"\bcurl\b[^\n|;]{0,500}?\s(?:-u|--user)[ =]?[\"']?[^\s:\"'$]{1,200}:((?!\$)[^\s\"']+)",
        r"(?i:\baws_secret_access_key)[\s=:]+[\"']?([\w+/]{8,})",
    )
]
"""Shapes of secrets in a text. A group of each is the secret. What may repeat is bounded, so that long texts take linear time."""
_ASSIGNMENT = re.compile(
    r"(?<![\w$/.-])(?:-{0,2}([A-Za-z][\w.-]{0,120})\\?[\"']?(=|[ ]{1,8}=[ ]{1,8}|:[ ])"
    r"|(?:--(?!secrets? )|(?=[A-Z][A-Z\d]{0,40}_[A-Z\d_]{1,60} ))([A-Za-z][\w-]*)(?: )+(?!-))"
    r"(?=(\\?[\"'])?((?![$(<{\"'\\]|~/)[^\s\"'`,;&)}\]\\]{4,}))"
)
"""A name and its value in a text, such as a command; a variable such as HF_TOKEN needs no sign. A value that the shell looks up is none.
The value of one name may be the next name, as in `ValueError: password=...`."""
_CODE = re.compile(r"[a-zA-Z_]\w*(?:\.[a-zA-Z_]\w*)+(?:[\[(].*)?|\w*[\[(].*")
"""A value that stands in code, as in the lines of a traceback."""
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
    words = _BOUNDARY.sub("_", key).lower()
    text = str(value).strip()
    if not text or _SETTINGS.fullmatch(text) or text.lower() in re.split(r"[._]", words) or _VOCABULARY.search(words):
        return False
    parts = words.split(".")
    sections = [_ADDITIONS.sub("", ".".join(parts[:count])) for count in range(len(parts), 0, -1)]
    return any(
        (is_text or name.has_numbers) and end.search(section) and value_form.fullmatch(text)
        for section in sections
        for name, (end, value_form) in zip(NAMES, _COMPILED, strict=True)
    )


def secrets_in(text: str, key: str = "") -> Iterator[tuple[int, int]]:
    """Yield the first and the last position of each secret in a text, by the shapes and by the names of what the text assigns.

    Args:
        text: Any text.
        key: Dotted key of the text.
    """
    for shape in SHAPES:
        for match in shape.finditer(text):
            yield match.span(match.lastindex or 0)
    for match in _ASSIGNMENT.finditer(text):
        option, sign, flag, quote, value = match.groups()
        # Where words may stand around a name, a value is quoted or has a digit. `token = batch_2` stands in code.
        may_be_prose = not quote and (sign != "=" if option else flag.isupper())
        is_prose = may_be_prose and (not re.search(r"\d", value) or ((sign or "").startswith(" ") and "_" in value))
        if not is_prose and not _CODE.fullmatch(value) and is_secret(f"{key}.{option or flag}", value):
            yield match.span(5)
