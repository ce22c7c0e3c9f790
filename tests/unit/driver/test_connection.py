"""Tests of the environment variables that a driver passes on to its workers when it connects to Ray."""

import json
import os
from pathlib import Path

import pytest
import ray

from undula.driver.connection import connected
from undula.elastic.ray import private_environment
from undula.elastic.ray.private_environment import NAMES, URI, names_for_workers, names_of
from undula.errors import UsageError
from undula.masking.values import NAMES as SECRETS
from undula.masking.values import declare


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (NAMES, URI):
        monkeypatch.delenv(name, raising=False)


def test_a_script_that_has_connected_itself_cannot_have_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with connected():
        pass
    monkeypatch.setenv(*names_of({"HF_TOKEN": "x"}).popitem())
    with (
        pytest.raises(UsageError, match=r"workers cannot get the variable HF_TOKEN; remove its ray.init\(\)"),
        connected(),
    ):
        pass


def test_workers_get_the_secrets_that_the_settings_of_a_script_refer_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stored: dict[str, bytes] = {}

    class Storage:
        _internal_kv_put = staticmethod(stored.__setitem__)

    monkeypatch.setattr(private_environment, "_storage", lambda: Storage)
    declare({"HF_TOKEN": "of-no-shape"})  # and the script deletes its variable
    with private_environment.passed_on() as variables:
        assert variables[URI].startswith("gcs://")
    assert json.loads(stored[variables[URI]]) == {"HF_TOKEN": "of-no-shape", SECRETS: '["HF_TOKEN"]'}
    assert names_for_workers() == [], "the submitter or this driver has stored them"
    os.environ.pop(URI)
