"""Tests of the environment variables that a user gives to a job."""

import json
import os
from pathlib import Path

import pytest

from undula.config.environment import OVERRIDES, PLACE, having, job_environment, with_secrets, without_secrets
from undula.config.job import changed_key, load_spec
from undula.errors import SpecError
from undula.masking.values import NAMES, declare, mask


def test_variables_come_from_the_command_line_the_environment_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.env").write_text("# comment\n\nA=1\nexport B = 'two words' \nC=x=y#z\nD=\n")
    monkeypatch.setenv("HF_TOKEN", "t")
    variables = job_environment(["A=2", "E=a=b"], ["HF_TOKEN"], [tmp_path / "a.env"])
    assert json.loads(variables.pop(NAMES)) == ["B", "C", "D", "HF_TOKEN"]
    assert variables == {"A": "2", "B": "two words", "C": "x=y#z", "D": "", "E": "a=b", "HF_TOKEN": "t"}


@pytest.mark.parametrize(
    ("env", "secrets", "text", "sentence"),
    [
        (["HF_TOKEN"], [], "", "command line: --env HF_TOKEN: write NAME=VALUE, or --secret HF_TOKEN"),
        (["A-B=hunter2"], [], "", "command line: --env A-B: write NAME=VALUE"),
        (
            ["PYTHONPATH=/x"],
            [],
            "",
            "--env PYTHONPATH: Python reads it before a process takes the variables of its job; set it in",
        ),
        ([], ["MISSING_X"], "", "--secret MISSING_X: the environment has no such variable"),
        ([], [], "A=1\nhunter2 hunter2\n", "secrets.env:2: the line is not NAME=VALUE"),
    ],
)
def test_invalid_variables_are_refused_without_their_values(
    env: list[str], secrets: list[str], text: str, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "secrets.env").write_text(text)
    with pytest.raises(SpecError) as error:
        job_environment(env, secrets, [tmp_path / "secrets.env"])
    assert sentence in str(error.value)
    assert "hunter2" not in str(error.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"--secret-file .* cannot be read: FileNotFoundError"):
        job_environment([], [], [tmp_path / "none"])


def test_overrides_with_secrets_do_not_stand_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--fresh", "name=a", "config.api_key=k", "config.eos_token='</s>'"]
    shown, private = without_secrets(given)
    assert shown == ("--fresh", "name=a", PLACE, "config.eos_token='</s>'")
    assert json.loads(private[OVERRIDES]) == ["config.api_key=k"]
    assert without_secrets(["name=a"]) == (("name=a",), {})
    monkeypatch.setenv(OVERRIDES, private[OVERRIDES])
    assert with_secrets(shown) == given


def test_overrides_with_secrets_are_applied_in_their_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The driver of a job and `--print` resolve the same values as the command that submits the job."""
    file = tmp_path / "job.yaml"
    file.write_text("name: job\ndata: {train: x}\n")
    given = ["config.db={host: old, password: k}", "config.db.host=new", "config.db.password=l"]
    shown, private = without_secrets(given)
    monkeypatch.setenv(OVERRIDES, private[OVERRIDES])
    assert load_spec(file, with_secrets(shown)).config == load_spec(file, given).config
    assert load_spec(file, given).config.db == {"host": "new", "password": "l"}


def test_a_copied_command_line_without_its_secrets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OVERRIDES, raising=False)
    with pytest.raises(
        SpecError, match="stands for an override that a list of jobs must not show; give the override itself"
    ):
        with_secrets(["name=a", PLACE])


def test_a_reference_has_the_value_of_a_variable_which_no_record_shows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: job\ndata: {train: x}\nconfig:\n  login: me ${env:PLANTED}\n  urls: ['https://me:${env:PLANTED}@host']\n  lr: 1\n"
    )
    monkeypatch.setenv("PLANTED", "of-no-shape")
    loaded = load_spec(file, ["config.more=${env:PLANTED}"])
    assert loaded.config == {
        "login": "me of-no-shape", "urls": ["https://me:of-no-shape@host"], "lr": 1, "more": "of-no-shape"
    }  # fmt: skip
    assert loaded.variables == {"PLANTED": "of-no-shape"}
    assert "of-no-shape" not in str(loaded.tree()) + loaded.to_yaml()
    assert mask("of-no-shape") == "***"
    assert without_secrets(["config.more=${env:PLANTED}"]) == (("config.more=${env:PLANTED}",), {})
    before = loaded.tree()
    monkeypatch.setenv("PLANTED", "of-no-shape-too")
    changed = changed_key(before, load_spec(file, ["config.more=${env:PLANTED}"]).tree())
    assert changed
    assert changed[0] == "config.login"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("config.key=${env:MISSING_X}", "command line: config.key refers to ${env:MISSING_X}, but the environment has no such variable; "),
        ("config.key=${env:SHORT}", "config.key refers to ${env:SHORT}, whose value cannot be masked, because it has fewer than 6 "),
        ("data.train=s3://${env:PLANTED}/x", "data.train refers to ${env:PLANTED}, but a secret can stand only below config and trackers"),
        ("data.train=s3://of-no-shape/x", "data.train has the value of a secret in it, and every record of the run shows it; give the "),
        ("name=of-no-shape", "command line: name has the value of a secret in it"),
    ],
)  # fmt: skip
def test_a_secret_that_a_record_would_show_is_refused(
    override: str, sentence: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: job\ndata: {train: x}\n")
    monkeypatch.setenv("PLANTED", "of-no-shape")
    monkeypatch.setenv("SHORT", "hush")
    declare({"PLANTED": "of-no-shape"})
    with pytest.raises(SpecError) as error:
        load_spec(file, [override])
    assert sentence in str(error.value)
    assert "hush" not in str(error.value)


def test_a_value_of_env_is_no_secret() -> None:
    assert NAMES not in job_environment(["MODE=training"], [], [])
    assert json.loads(job_environment(["DB_PASSWORD=training", "MODE=training"], [], [])[NAMES]) == ["DB_PASSWORD"]


def test_a_block_has_the_variables_of_a_job_and_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLANTED", raising=False)
    with having({"PLANTED": "of-no-shape", NAMES: '["PLANTED"]'}):
        assert os.environ["PLANTED"] == "of-no-shape"
    assert not {"PLANTED", NAMES} & os.environ.keys()
    assert mask("of-no-shape") == "***"
