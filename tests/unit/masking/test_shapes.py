"""Tests of the tables of names and shapes that give a secret away, and of what only looks like one."""

import json
import time

import pytest
from hard_lines import HARD

from undula.masking.shapes import CORES, TOKEN, TOKENS, is_secret
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


ISSUED = {
    "age": f"AGE-SECRET-KEY-1{'QPZRY9X8' * 8}",
    "Bedrock": f"ABSK{RANDOM * 3}",
    "Databricks": f"dapi{HEX}",
    "DigitalOcean": f"dop_v1_{HEX}{HEX}",
    "Discord": f"M{RANDOM}abcd.a1B2c3.{RANDOM}abcdefg",
    "Docker Hub": f"dckr_pat_{RANDOM}abcdefg",
    "Doppler": f"dp.pt.{RANDOM * 2}",
    "GitLab's runners": f"glrt-{RANDOM}",
    "Google OAuth": f"GOCSPX-{RANDOM}",
    "Grafana": f"glsa_{HEX}_0f3a9c27",
    "Heroku": f"HRKU-{RANDOM * 2}",
    "Hugging Face OAuth": f"hf_oauth_eyJhbGciOiJIUzI1NiJ9.{RANDOM}.{RANDOM}",
    "Hugging Face organizations": f"api_org_{'aBcDeF' * 6}",
    "LangSmith": f"lsv2_pt_{HEX}_0f3a9c27d4",
    "Linear": f"lin_api_{RANDOM * 2}",
    "Notion": f"ntn_{RANDOM * 3}",
    "OpenShift": f"sha256~{RANDOM * 2}abc",
    "Perplexity": f"pplx-{RANDOM * 2}",
    "PlanetScale": f"pscale_tkn_{RANDOM * 2}",
    "Postman": f"PMAK-{HEX[:24]}-{HEX}0f",
    "Prefect": f"pnu_{RANDOM}{RANDOM[:16]}",
    "Pulumi": f"pul-{HEX}0f3a9c27",
    "Replicate": f"r8_{RANDOM * 2}",
    "RubyGems": f"rubygems_{HEX}{HEX[:16]}",
    "RunPod": f"rpa_{RANDOM.upper() * 2}",
    "SendGrid": f"SG.{RANDOM}ab.{RANDOM * 2}abc",
    "Sentry": f"sntryu_{HEX}{HEX}",
    "Shopify": f"shpat_{HEX}",
    "Slack's apps": f"xapp-1-{RANDOM}",
    "Stripe test": f"sk_test_51H{RANDOM}",
    "Stripe webhooks": f"whsec_{RANDOM * 2}",
    "Tavily": f"tvly-{RANDOM}",
    "Twilio": f"SK{HEX}",
    "Vault": f"hvs.{RANDOM * 4}",
    "Weights & Biases": f"wandb_v1_{RANDOM}_{RANDOM}",
    "xAI": f"xai-{RANDOM * 3}",
    "1Password": f"ops_eyJ{RANDOM}",
    "AWS": "ASIAIOSFODNN7EXAMPLE",
    "Fly": f"fo1_{RANDOM * 2}abc",
    "GitHub": f"ghs_{RANDOM}",
    "Google": f"ya29.{RANDOM}",
    "Groq": f"gsk_{RANDOM}",
    "JWT": f"eyJhbGciOiJI.{RANDOM}.{RANDOM}",
    "npm": f"npm_{RANDOM}",
    "NVIDIA": f"nvapi-{RANDOM}",
    "OpenAI, Anthropic and others": f"sk-ant-api03-{RANDOM}",
    "PyPI": f"pypi-{RANDOM}",
    "Azure": f"abc8Q~{RANDOM}{RANDOM[:12]}",
    "AWS Bedrock": f"bedrock-api-key-{RANDOM}",
}
"""A made-up token of each service."""
ASSIGNED = {
    "X-Goog-Signature": f"https://b.storage.googleapis.com/o?X-Goog-Signature={HEX}",
    "X-Goog-Credential": f"https://b/o?X-Goog-Credential={RANDOM}",
    "authorization": f"Authorization: Token {HEX}",
    "authorization in JSON": f'{{"Authorization": "ApiKey {RANDOM}"}}',
    "password of .netrc": f"machine api.wandb.ai login user password {HEX}",
    "password of a line of .netrc": f"machine h\n  password {HEX}\n",
    "password of mysql": f"mysql -uroot -p{SECRET} db",
    "password in XML": f"<password>{SECRET}</password>",
    "key of PGP": f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n{RANDOM}\n-----END PGP PRIVATE KEY BLOCK-----",
    "auth of docker": f'"auth": "{RANDOM}=="',
    "password with blanks": f"host=h password='my {SECRET} 1 {SECRET}' dbname=x",
    "password with a comma": f'password="a1,{SECRET}"',
    "token of compact JSON": f'{{"hf_token":"{SECRET}","n":1}}',
    "password with <": f"password=<{SECRET}",
    "secret, long": f"secret={SECRET * 100}",
    "key, nested": f"key=abcd:password={SECRET}",
    "bearer": f"authorization: bearer {RANDOM}",
    "AccountKey": f"AccountKey={RANDOM}==;EndpointSuffix=x",
}
HARMLESS_LINES = {
    f"commit {HEX}0f3a9c27 (HEAD -> main)",
    "run 2026-11-29T23-42-25-0f3a9c27 in s3://bucket/runs/gpt-0f3a9c27d4e15b86",
    f"image sha256:{HEX}{HEX}",
    f"digest sha256={HEX}{HEX}",
    f"pull ghcr.io/a/b@sha256:{HEX}{HEX}",
    f'etag "{HEX}" md5 {HEX}',
    "node 0f3a9c27d4e15b860f3a9c27d4e15b860f3a9c27d4e15b86 died",
    "uuid 3f2a9c1d-1b2c-4d5e-8f90-aabbccddeeff",
    "https://wandb.ai/me/project/runs/a1b2c3d4",
    "/root/.cache/huggingface/hub/models--a--b/snapshots/0f3a9c27d4e15b860f3a9c27d4e15b86/model.safetensors",
    "docker run -u 1000:1000 -p8080:80 mysql",
    "curl -fsSL https://host/x | docker run --user 1000:1000 x",
    "machine a1 has password login disabled",
    "the password must have 8 characters",
    "password is required",
    "password: must have 8 characters",
    "<token>the</token><id>12345</id>",
    "<password>",
    "password=<your password>",
    "password={password}",
    "Basic information",
    "bearer token missing",
    "Authorization: required for host",
    "sig=SIGTERM exit=143",
    "2026-11-29 23:42:25,123 INFO trainer.py:120 step=120 loss=2.31",
    "torch.Size([2, 3]) cuda:0 bf16 key_padding_mask=None",
    "sk_test_data_loader",
    "whsec_ is the prefix",
    "r8_model_v2",
    "SG.EN",
    "hvs.example",
    "dp.pt.step",
    "pul-request-1234",
    "glrt-runner",
    "MNIST.train.images",
    "shpat_",
    "xapp-1",
    "attention.key.weight torch.float32",
    "monkey=banana seed=1234567",
    "wandb_v1_run",
    "SKIPPED 0123456789",
    "api_organization_of_somebody_else",
    'headers.get("Authorization").partition("Credential=")[2].partition("/")[0]',
    "fm1_score",
}


@pytest.mark.parametrize("service", ISSUED)
def test_a_token_of_a_service_is_masked(service: str) -> None:
    assert mask(f"before {ISSUED[service]} after") == "before *** after"
    assert mask(f'url/{ISSUED[service]}", "b"') == 'url/***", "b"'


def test_each_service_has_a_token() -> None:
    assert not [token.service for token in TOKENS if not any(token.service in name for name in ISSUED)]
    assert all(TOKEN.fullmatch(issued) for service, issued in ISSUED.items() if service != "Azure")


@pytest.mark.parametrize("name", ASSIGNED)
def test_a_secret_is_known_by_what_is_around_it(name: str) -> None:
    shown = mask(ASSIGNED[name])
    assert "***" in shown
    assert not [part for part in (SECRET, RANDOM, HEX) if part in shown], shown


@pytest.mark.parametrize("line", sorted(HARMLESS_LINES))
def test_a_line_without_a_secret_stays(line: str) -> None:
    assert mask(line) == line


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


def seconds(text: str) -> float:
    """Return the processor time in seconds that it takes to mask a text, without what other processes add."""
    begin = time.process_time()
    mask(text)
    return time.process_time() - begin


@pytest.mark.parametrize("name", HARD)
def test_a_long_line_takes_linear_time(name: str) -> None:
    """A quadratic pattern takes 4 times as long for a line of twice the length."""
    line = HARD[name] * (400_000 // len(HARD[name]))
    assert any(seconds(line) < 3 * seconds(line[: len(line) // 2]) for _ in range(5))


@pytest.mark.parametrize("name", NAMES)
def test_each_name_of_a_secret_has_a_word_by_which_others_are_passed_over(name: str) -> None:
    assert any(core in name.lower() for core in CORES)


def test_the_rest_of_a_text_stays_readable() -> None:
    assert mask(f"\x1b[1mapi_key\x1b[0m=\x1b[33m{SECRET[:4]}\x1b[0m{SECRET[4:]} \x1b[2mx") == (
        "\x1b[1mapi_key\x1b[0m=\x1b[33m***\x1b[0m \x1b[2mx"
    )
    assert mask(f"cannot read https://me:{SECRET}@host/x (403)") == "cannot read https://me:***@host/x (403)"
    assert mask(f"curl -u me:{SECRET} https://host") == "curl -u me:*** https://host"
    assert json.loads(mask(json.dumps({"password": SECRET, "n": [1]}))) == {"password": "***", "n": [1]}
