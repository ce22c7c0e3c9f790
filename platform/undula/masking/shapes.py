"""Secrets that nobody has declared, in any text: a safety net under those that the user has declared. They are known by tables of shapes,
and by names in front of values. All patterns take linear time: what repeats is possessive, or has a limit.

Also here: tokens of services that their form gives away. The sources are facts about the forms: a rule of gitleaks (config/gitleaks.toml,
MIT) or of detect-secrets (plugins, Apache-2.0) by its name, a standard, or public code that has or checks such tokens.

Also here: names that give a secret away, such as those of settings and of what a text assigns: a safety net under the secrets that the user
has declared.
"""

import re
from collections.abc import Iterable, Iterator
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


class Token(NamedTuple):
    """Tokens of a service."""

    service: str
    forms: tuple[str, ...]
    """Patterns, each of which begins with a letter. Lengths are lower limits, some well below what is issued, because vendors make tokens
    longer, and a part of a token is a secret, too."""
    source: str


TOKENS = (
    Token("1Password", (r"ops_eyJ[\w+/=-]{16,}",), "gitleaks 1password-service-account-token"),
    Token("age", (r"AGE-SECRET-KEY-1[A-Z\d]{40,}",), "gitleaks age-secret-key"),
    Token("AWS", (r"A[KS]IA[\w-]{12,}",), "gitleaks aws-access-token"),
    Token("AWS Bedrock", (r"ABSK[A-Za-z\d+/=]{40,}", r"bedrock-api-key-[\w+/=-]{16,}"), "gitleaks aws-amazon-bedrock-api-key-*"),
    Token("Databricks", (r"dapi[\da-f]{32}(?:-\d+)?",), "gitleaks databricks-api-token"),
    Token("DigitalOcean", (r"do[opr]_v1_[\da-f]{32,}",), "gitleaks digitalocean-*"),
    Token("Discord", tuple(rf"{first}[\w-]{{23,25}}\.[\w-]{{6}}\.[\w-]{{27,38}}" for first in "MNO"), "detect-secrets discord"),
    Token("Docker Hub", (r"dckr_(?:pat|oat)_[\w-]{20,}",), "public code"),
    Token("Doppler", (r"dp\.(?:pt|st|ct|sa|scim|audit)\.[\w.-]{32,}",), "gitleaks doppler-api-token"),
    Token("Fly", (r"fo1_[\w-]{40,}", r"fm[12][ar]?_[A-Za-z\d+/=]{60,}"), "gitleaks flyio-access-token"),
    Token("GitHub", (r"gh[pousr]_[A-Za-z\d]{16,}", r"github_pat_\w{16,}"), "gitleaks github-*"),
    Token("GitLab", (r"gl(?:agent|cbt|dt|ffct|ft|imt|oas|pat|ptt|rt|soat)-[\w-]{16,}",), "gitleaks gitlab-*"),
    Token("Google", (r"AIza[\w-]{12,}", r"ya29\.[\w-]{16,}", r"GOCSPX-[\w-]{20,}"), "gitleaks gcp-api-key; public code"),
    Token("Grafana", (r"glsa_[A-Za-z\d]{32}_[\dA-Fa-f]{8}", r"glc_[A-Za-z\d+/=]{32,}"), "gitleaks grafana-*"),
    Token("Groq", (r"gsk_[A-Za-z\d]{16,}",), "public code"),
    Token("Heroku", (r"HRKU-[\w-]{36,}",), "gitleaks heroku-api-key-v2"),
    Token("Hugging Face", (r"hf_[A-Za-z\d]{16,}", r"hf_oauth_[\w.-]{16,}", r"api_org_[A-Za-z]{30,}"), "gitleaks huggingface-*"),
    Token("JWT", (r"eyJ(?<!-eyJ)[\w-]{8,}+\.[\w-]{8,}+\.[\w-]*+",), "RFC 7519; a header in JSON begins so in base64"),
    Token("LangSmith", (r"lsv2_(?:pt|sk)_[\da-f_]{32,}",), "public code"),
    Token("Linear", (r"lin_(?:api|oauth)_[A-Za-z\d]{32,}",), "gitleaks linear-api-key"),
    Token("Notion", (r"ntn_[A-Za-z\d]{40,}",), "gitleaks notion-api-token"),
    Token("npm", (r"npm_[A-Za-z\d]{16,}",), "gitleaks npm-access-token"),
    Token("NVIDIA", (r"nvapi-[\w-]{16,}",), "public code"),
    Token("OpenAI, Anthropic and others", (r"sk-(?=[A-Za-z_-]{0,48}+\d)[\w-]{16,}",), "gitleaks openai-api-key, anthropic-*"),
    Token("OpenShift", (r"sha256~[\w-]{43}(?![\w-])",), "gitleaks openshift-user-token"),
    Token("Perplexity", (r"pplx-[A-Za-z\d]{32,}",), "gitleaks perplexity-api-key"),
    Token("PlanetScale", (r"pscale_(?:tkn|oauth|pw)_[\w=.-]{32,}",), "gitleaks planetscale-*"),
    Token("Postman", (r"PMAK-[\da-fA-F]{24}-[\da-fA-F]{34}",), "gitleaks postman-api-token"),
    Token("Prefect", (r"pn[ub]_[A-Za-z\d]{36}",), "gitleaks prefect-api-token"),
    Token("Pulumi", (r"pul-[\da-f]{40}",), "gitleaks pulumi-api-token"),
    Token("PyPI", (r"pypi-[\w-]{16,}",), "gitleaks pypi-upload-token"),
    Token("Replicate", (r"r8_[A-Za-z\d]{32,}",), "public code"),
    Token("RubyGems", (r"rubygems_[\da-f]{48}",), "gitleaks rubygems-api-token"),
    Token("RunPod", (r"rpa_[A-Z\d]{32}\w*",), "public code"),
    Token("SendGrid", (r"SG\.[\w-]{16,32}\.[\w-]{32,}",), "detect-secrets sendgrid; gitleaks sendgrid-api-token"),
    Token("Sentry", (r"sntry[su]_[\w+/=]{40,}",), "gitleaks sentry-org-token, sentry-user-token"),
    Token("Shopify", (r"shp(?:at|ca|pa|ss)_[\da-fA-F]{32}",), "gitleaks shopify-*"),
    Token("Slack", (r"xox[abeoprs]-[\w-]{8,}", r"xapp-\d-[\w-]{16,}"), "gitleaks slack-*"),
    Token(
        "Stripe",
        (r"sk_(?:live|test|prod)_[A-Za-z\d]{10,}", r"rk_(?:live|test|prod)_[A-Za-z\d]{10,}", r"whsec_[A-Za-z\d+/=]{24,}"),
        "gitleaks stripe-access-token; public code",
    ),
    Token("Tavily", (r"tvly-[\w-]{20,}",), "public code"),
    Token("Twilio", (r"SK[\da-f]{32}",), "gitleaks twilio-api-key; detect-secrets twilio"),
    Token("Vault", (r"hv[sb]\.[\w-]{24,}",), "gitleaks vault-service-token, vault-batch-token"),
    Token("Weights & Biases", (r"wandb_v\d_\w{20,}",), "public code; keys without a prefix are known by names only"),
    Token("xAI", (r"xai-[A-Za-z\d]{40,}",), "public code"),
)  # fmt: skip


def one_of(forms: Iterable[str]) -> str:
    """Return a pattern of any of these forms, each of which begins with a letter. It looks only at those with the right first letter."""
    rests: dict[str, list[str]] = {}
    for form in forms:
        rests.setdefault(form[0], []).append(form[1:])
    return "|".join(f"{first}(?:{'|'.join(each)})" for first, each in rests.items())


TOKEN = re.compile(rf"\b(?=[A-Za-z][\w.~+/=-]{{11}})(?:{one_of(form for token in TOKENS for form in token.forms)})")
"""Any of these tokens. Each form takes a limited time at a place where it does not match, so that long texts take linear time."""


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
