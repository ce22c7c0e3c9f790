"""Tokens of services that their form gives away. The sources are facts about the forms: a rule of gitleaks (config/gitleaks.toml, MIT) or
of detect-secrets (plugins, Apache-2.0) by its name, a standard, or public code that has or checks such tokens."""

import re
from collections.abc import Iterable
from typing import NamedTuple


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
