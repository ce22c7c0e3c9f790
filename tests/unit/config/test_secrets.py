"""Tests of what counts as a secret, and of what is shown in its place."""

from pathlib import Path
from typing import Any

import pytest

from undula.config.job import changed_key, load_spec
from undula.config.secrets import has_secret, hide_secrets
from undula.errors import SpecError

SECRET = "hunter2-sesame"
SECRETS: dict[str, Any] = {
    "secret_key": SECRET, "clientSecret": SECRET, "authToken": SECRET, "passphrase": SECRET, "password": SECRET, "PASSWD": SECRET,
    "db_pass": SECRET, "pwd": SECRET, "token": SECRET, "hf_token": SECRET, "session_token": SECRET, "accesstoken": SECRET,
    "apiKey": SECRET, "openaiApiKey": SECRET, "wandb_api_key": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET, "aws_access_key_id": SECRET,
    "secret_key_base": SECRET, "privateKey": SECRET, "signing_key": SECRET, "credentials": {"user": SECRET}, "passwords": [SECRET],
    "api_tokens": [SECRET], "dsn": SECRET, "auth": f"me:{SECRET}", "database_url": f"postgres://db/{SECRET}", "webhook_url": SECRET,
    "connection_string": f"Server=db;Password={SECRET}", "tracking_uri": f"https://me:{SECRET}@mlflow", "args": [f"--password={SECRET}"],
    "header": f"Authorization: Bearer {SECRET}", "image": f"https://b.s3/x?X-Amz-Signature={SECRET}",
    "wandb": {"key": SECRET}, "openai": {"prod": {"key": SECRET}}, "api": {"key": SECRET}, "aws": {"key": SECRET},
    "tracker": {"key": SECRET}, "api_keys": {"weather": SECRET}, "tokens": {"hub": SECRET}, "Token": {"hub": SECRET},
    "access_key": {"value": SECRET}, "keys": {"openai": SECRET}, "webhooks": {"alerts": SECRET},
    "private_key": {"pem": [SECRET]}, "authorization": {"basic": f"user:{SECRET}"}, "DSN": {"url": SECRET}, "credential": {"pin": 471147},
    "database": {"url": f"postgres://db/{SECRET}"}, "api.keys": {"prod": {"weather": SECRET}}, "webhook": {"url": SECRET},
    "hf_token_prod": SECRET, "password_prod": SECRET, "api_key_v2": SECRET, "otp": 471147, "command": f"login --password {SECRET}",
    "slack": f"https://hooks.slack.com/services/T0/B0/{SECRET}", "arguments": ["--user", "me", "--password", SECRET],
    "repository": f"https://{SECRET}@github.com/a/b", "sentry": f"https://{SECRET}@o1.ingest.sentry.io/2",
    "telegram": f"471147471:{'A' * 20}-{SECRET}", "user_token": SECRET, "bot_token": SECRET, "chat": {"token": {"user": SECRET}},
    "deep": {"more": [{"pin_password": 1}]}, "note": "-----BEGIN RSA PRIVATE KEY-----\nMIIE", "setting": "hf_abcdefghijklmnopqrstuvwx",
}  # fmt: skip
"""Secrets by their names and forms."""
HARMLESS: dict[str, Any] = {
    "eos_token": "</s>", "mask_token": "[MASK]", "bos_token": "bos", "pad_token": "PAD", "unk_token": "unk", "image_token": "image",
    "system_token": "<|system|>", "decoder_start_token": "start", "special_tokens": ["<a>", "<b>"], "tokens": "300B", "max_tokens": "4k",
    "num_tokens": 5, "tokens_per_step": "2M", "tokenizer": "gpt2", "eos_token_id": 5, "sort_key": "name", "key": "label",
    "image_key": "png", "primary_key": "id", "public_key": "ssh-rsa A", "kms_key_id": "12", "num_key_value_heads": 8,
    "password_file": "/run/password", "token_path": "/run/token", "auth_mode": "token", "forward_pass": "fast",
    "author": "me", "secretary": "Ann",
    "monkey": "x",
    "data": "s3://bucket/train", "endpoint": "http://localhost:9000", "remote": "git@github.com:a/b", "prompt": "Answer: yes, please",
    "secret": None,
    "license_key": "license", "auth": "none", "webhook": "None", "cookie": "enabled", "pass": "forward", "token": "char", "subtoken": "bpe",
    "user_token": "### User:", "assistant_token": "ASSISTANT:", "tool_call_token": "tool_call", "password": "none", "wandb": {"key": None},
    "tokens_of": {"max": 4096}, "Tokens": {"max": 4096, "train": "300B", "eos": "eos", "mask": "[MASK]"}, "key_dim": "64", "n_keys": "8",
    "keys": {"image": "png"}, "sort": {"key": "name"}, "model": {"key": {"dim": "64"}}, "public_keys": {"me": "ssh-rsa A"},
    "extra_special_tokens": {"user": "user"}, "sacred": {"observer": "mongo"}, "repository": "https://github.com/a/b@v1",
    "ssh": "ssh://git@github.com/a", "jwt": {"expires_s": 3600, "is_on": True}, "command": "login --password-stdin --token-path /run/token",
    "has_password": True, "api_key": "", "hub_token": "${HF_TOKEN}", "kernel": "k=3, key=value",
}  # fmt: skip
"""Settings that only look like secrets."""


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_hidden(name: str) -> None:
    shown = hide_secrets({"config": {name: SECRETS[name]}})
    assert shown != {"config": {name: SECRETS[name]}}
    assert SECRET not in str(shown)
    assert "471147" not in str(shown)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_setting_is_shown(name: str) -> None:
    assert hide_secrets({"config": {name: HARMLESS[name]}}) == {"config": {name: HARMLESS[name]}}


def test_what_is_hidden_stays_as_it_is() -> None:
    once = hide_secrets(SECRETS)
    assert hide_secrets(once) == once
    assert hide_secrets({"overrides": {"config.api_key": "k"}})["overrides"] == {
        "config.api_key": hide_secrets({"api_key": "k"})["api_key"]
    }


def test_overrides_with_secrets_are_known() -> None:
    hidden = (
        "config.api_key=x",
        "config.db={password: x}",
        "overrides={config.api_key: x}",
        "config.url=ftp://me:pw@x/",
        "config.tracker.key=x",
        "config.wandb={key: x}",
        "config.wandb={key: hunter2",
        "config.credentials.pin=1234",
        "config.tokens.hub=x",
    )
    assert all(map(has_secret, hidden))
    assert not any(map(has_secret, ("plan.seed=3", "config.eos_token='</s>'", "name=job")))


@pytest.mark.parametrize("name", ["eos_token", "api_key"])
def test_a_run_does_not_resume_with_another_value_whether_it_is_shown_or_hidden(name: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"

    def tree(value: str) -> dict[str, Any]:
        file.write_text(f"name: job\ndata: {{train: x}}\nconfig: {{{name}: {value}}}\n")
        return load_spec(file).tree()

    assert changed_key(tree("abcd"), tree("abcd")) is None
    changed = changed_key(tree("abcd"), tree("efgh"))
    assert changed
    assert changed[0] == f"config.{name}"
    # Former versions hid what is shown now, or hid it without a digest, and showed what is hidden now.
    assert changed_key({"config": {name: "(hidden)"}}, {"config": tree("abcd")["config"]}) is None
    assert changed_key({"config": {name: "abcd"}}, {"config": tree("abcd")["config"]}) is None


@pytest.mark.parametrize(
    ("text", "override"),
    [
        ("config: {lr: 1}\nplan: {seed: 1, api_key: hunter2}", ""),
        ("", "config.api key=hunter2"),
        ("", "config.api_key={hunter2"),
        ("config: {password: hunter2}", "config.password.x=1"),
        ("config: {wandb: {key: hunter2}}", "config.wandb.key.x=1"),
        ("", "config.wandb={key: hunter2"),
        ("runs: {password: hunter2}", ""),
    ],
)
def test_messages_about_invalid_values_do_not_show_secrets(text: str, override: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"name: job\ndata: {{train: x}}\n{text}\n")
    with pytest.raises(SpecError) as error:
        load_spec(file, [override] if override else [])
    assert "hunter2" not in str(error.value)
