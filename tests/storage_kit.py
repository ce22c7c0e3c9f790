"""Servers and credentials of AWS for this process, in tests of storage."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from s3_server import P, serving

from undula.storage.s3 import forget_clients

ROLE = """<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleResult><Credentials>
<AccessKeyId>ASIAROLE</AccessKeyId><SecretAccessKey>secret</SecretAccessKey><SessionToken>token</SessionToken>
<Expiration>2099-01-01T00:00:00Z</Expiration></Credentials><AssumedRoleUser><Arn>arn</Arn><AssumedRoleId>id</AssumedRoleId>
</AssumedRoleUser></AssumeRoleResult></AssumeRoleResponse>"""
"""Answer of STS with the credentials of a role."""
CONFIG = """[profile role]\nrole_arn = arn:aws:iam::123456789012:role/x\nsource_profile = base\nregion = us-east-1
[profile base]\naws_access_key_id = AKIABASE\naws_secret_access_key = secret\n"""
"""Configuration of AWS with a profile that assumes that role."""


@contextmanager
def used(server: P, monkeypatch: pytest.MonkeyPatch) -> Iterator[P]:
    """Serve requests, among them those of this process, until the block ends."""
    with serving(server):
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        forget_clients()
        yield server


def use_profile(name: str | None, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process take its credentials from a profile alone; without a name, from none."""
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    if name:
        monkeypatch.setenv("AWS_PROFILE", name)
    forget_clients()
