"""Tests of the tables of names and shapes that give a secret away, and of what only looks like one."""

import json
import time

import pytest

from undula.masking.names import is_secret
from undula.masking.values import mask

SECRET = "hunter2-sesame"
HEX = "0f3a9c27d4e15b86" * 2
RANDOM = "Zk93hQx7LmT2vRb8WnYc"
NAMES = {
    "kaggle.key": HEX, "kaggle_key": SECRET, "KAGGLE_KEY": SECRET, "config.kaggle.key": "x", "pw": "sesame", "db_pw": "sesame",
    "pwd": SECRET, "stability_key": SECRET, "pinecone_key": SECRET, "replicate_key": SECRET, "groq_key": SECRET, "deepgramKey": SECRET,
    "serper_key": SECRET, "langsmith_key": SECRET, "together_key": SECRET, "nvidia.key": SECRET, "ngc_key": SECRET,
    "google_key": SECRET, "openaiKey": SECRET, "unheard_of_key": RANDOM, "config.unheard.key": HEX,
    "acme.key": "3f2a9c1d-1b2c-4d5e-8f90-aabbccddeeff", "smtp_pass": "sesame", "hub-token": SECRET, "my token": SECRET,
    "keys.openai": "x", "credential.pin": 471147, "password": 471147,
}  # fmt: skip
HARMLESS_NAMES = {
    "tokens_per_batch": 4096, "tokens_per_second": "12000 per node", "key": "sample_id", "data.key": "sample_id",
    "max_token_length": "512", "keyed": "by sample 0f3a9c27d4e15b86", "pwd": "/home/me/work-2024", "private_rows": "12000-24000",
    "PWD": "~/work2024/job", "feature_key": "layer4_pool_resnet50", "sort_key": "date_2024_01_01", "key_dim": 64,
    "public_key": f"ssh-rsa {RANDOM}", "password_file": "/run/secrets/pw2024", "token": 50257, "api_key": None, "is_secret": True,
    "wandb.key": "null", "pw": 3, "tokenizer": "meta-llama/Llama-3-8B", "secret_santa": SECRET, "keypoints": HEX, "monkey": HEX,
    "author": SECRET, "mask_token": "<mask_0001>", "special_tokens": "extra_token_01", "access": "read-only-2024",
    "kaggle.username": "me-2024", "private.folder": "/data/0001", "bos_token": "<|begin_of_text|>", "hidden_dim": 4096,
    "checkpoint.keep": 3, "hub.api_key": "${env:HF_TOKEN}",
}  # fmt: skip
TEXTS = {
    f"nvapi-{RANDOM}", f"npm_{RANDOM}", f"pypi-{RANDOM}", f"gsk_{RANDOM}", f"ya29.{RANDOM}", f"sk-proj-{RANDOM}", f"hf_{RANDOM}",
    f"ghp_{RANDOM}", f"github_pat_11_{RANDOM}", f"glpat-{RANDOM}", f"AKIA{RANDOM}", f"xoxb-{RANDOM}",
    f"curl -u me:{SECRET} https://host/x", f"curl -s --user 'me:{SECRET}' https://host", f"ftp://me:{SECRET}@host/x",
    f"https://me:{SECRET}@host:8443/x", f"https://{RANDOM}@host/x", f"https://me:p@{SECRET}@host", f"https://me:a/{SECRET}@host",
    f"redis://:{SECRET}@host:6379", f"--password {SECRET}", f"--password={SECRET}", f"password={SECRET}", f"error: password: {SECRET}",
    f"ValueError: password={SECRET}", f"docker run -e HF_TOKEN={SECRET} image", f"error: --password {SECRET}",
    f"job: start: password: {SECRET}", f"Authorization: Bearer {SECRET}", f"Authorization: Basic {RANDOM}==",
    f"https://b.s3/x?X-Amz-Signature={RANDOM}&a=b", f"https://host/x?api_key={SECRET}&a=b", f"{{'password': '{SECRET}'}}",
    json.dumps({"hf_token": SECRET, "n": 1}), json.dumps(json.dumps({"hf_token": SECRET})), f"eyJhbGciOiJI.{RANDOM}.{RANDOM}",
    f"aws_secret_access_key = {RANDOM}", f"-----BEGIN RSA PRIVATE KEY-----\n{RANDOM}\n-----END RSA PRIVATE KEY-----",
    f"Server=db;Password={SECRET};Timeout=3", f"OSError: https://me:{SECRET}@host, password={SECRET}",
    f'api_key = "{SECRET}"', f"api_key  =  '{SECRET}'", f"password = {SECRET}", f'db.password="{SECRET}"', f"WANDB_API_KEY {HEX}",
    f"export MY_HF_TOKEN {SECRET}", f"\x1b[1mapi_key\x1b[0m=\x1b[33m{SECRET[:4]}\x1b[0m{SECRET[4:]}", f"sk-\x1b[31mlive{RANDOM}\x1b[0m",
    f"\x1b[01;31m\x1b[Khf_\x1b[m\x1b[K{RANDOM}", f"token \x1b[01;31m\x1b[Khf_{RANDOM}\x1b[m\x1b[K",
    f"INFO:root:{RANDOM}{RANDOM}{RANDOM}Ab1/", f"{RANDOM}+{RANDOM}{RANDOM}{RANDOM[:9]}",
    f"471147471:{RANDOM}{RANDOM[:15]}", f"https://hooks.slack.com/services/T0/{RANDOM}",
}  # fmt: skip
HARMLESS_TEXTS = {
    "{'loss': '2.345', 'num_tokens': '1.235e+08'}",
    "loss_per_token=3.2e-05 tokens: 1.23e+09 total_tokens=2.13GTok tokens=1234.5tok/s",
    "http://localhost:8265/a@b", "https://github.com/a/b@v1", "ssh://git@github.com/a", "https://git@github.com/a/b",
    "git@github.com:a/b", "s3://bucket/train@2024", "http://HOST:8265", "give it with --secret WANDB_API_KEY",
    "the token: it should be a string", "password: required", "sk-learn-contrib-of-somebody", "task-0123456789abcdefghij",
    "hf_hub_download_with_a_cache", "Basic authentication", "Bearer of bad news", "config.password is missing; add it",
    "key=value, k=3", "raise KeyError(key)", "f(token=token, password=args.password)",
    "step 120/400  loss 2.4131  lr 2.10e-03  812 samples/s", "api_key=os.environ['KEY']", "curl -u me:$PASSWORD https://host",
    "HF_TOKEN=$(cat t)", "12:34:56  worker 10.0.0.1:6379 joined", "plan.global_batch=128 tokens_per_batch=4096",
    "npm_config_registry_of_the_whole_team", '{"tokens": 12000000000, "keys": ["a1b2c3d4"]}', "http://[::1]:8265/a@b",
    "metrics(num_tokens=current_session_num_tokens)", "postgres://me:${env:DB_PASSWORD}@host/db", "PASSWORD=${PASSWORD}",
    "num_tokens = 123456789 max_tokens = 4096", "token = next(tokens) if token == 12345678 else tokens2(rows)", "NUM_TOKENS 1234567890",
    "assert token == 'abcd1234'", "WANDB_API_KEY environment variable", "api_key = os.environ['KEY']", "token = prev_token2",
    "password = required", "MASTER_PORT 29500 RUN_ID a1b2c3d4e5f60718", f"sha256 {HEX}{HEX}", "\x1b[32mloss\x1b[0m 2.4",
    f"path /{'Data/Set7/' * 6}abc", 'HF_TOKEN="$(cat ~/hf)" PASSWORD=${PASSWORD} run', "RuntimeError: file=abcdefgh",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_name_gives_a_secret_away(name: str) -> None:
    assert is_secret(name, NAMES[name])


@pytest.mark.parametrize("name", HARMLESS_NAMES)
def test_a_harmless_setting_is_no_secret(name: str) -> None:
    assert not is_secret(name, HARMLESS_NAMES[name])


@pytest.mark.parametrize("text", sorted(TEXTS))
def test_a_shape_is_masked(text: str) -> None:
    shown = mask(f"before {text} after")
    assert not [part for part in (SECRET, RANDOM) if part in shown], shown
    assert HEX not in shown, shown
    assert shown.startswith("before ")
    assert mask(shown) == shown


@pytest.mark.parametrize("text", sorted(HARMLESS_TEXTS))
def test_a_harmless_text_stays(text: str) -> None:
    assert mask(f"before {text} after") == f"before {text} after"


@pytest.mark.parametrize("piece", ["://a:", "https://a", "curl ", "a-", "password=a ", "eyJaaaaaaaa."])
def test_a_long_text_takes_linear_time(piece: str) -> None:
    """With a quadratic pattern, it takes 20 s."""
    begin = time.process_time()
    mask(piece * 20_000)
    assert time.process_time() - begin < 5


def test_the_rest_of_a_text_stays_readable() -> None:
    assert mask(f"\x1b[1mapi_key\x1b[0m=\x1b[33m{SECRET[:4]}\x1b[0m{SECRET[4:]} \x1b[2mx") == (
        "\x1b[1mapi_key\x1b[0m=\x1b[33m***\x1b[0m \x1b[2mx"
    )
    assert mask(f"cannot read https://me:{SECRET}@host/x (403)") == "cannot read https://me:***@host/x (403)"
    assert mask(f"curl -u me:{SECRET} https://host") == "curl -u me:*** https://host"
    assert json.loads(mask(json.dumps({"password": SECRET, "n": [1]}))) == {"password": "***", "n": [1]}
