"""Tests of the runtime environment that a user gives to a job: what Ray gets of it, and what is refused before anything starts."""

import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.runtime_env import RuntimeEnv

from undula.config.environment import job_environment
from undula.config.job import load_spec
from undula.driver import submit
from undula.driver.runtime_env import load_runtime_env
from undula.driver.submission import Submission, run_in_this_process, run_submission, submission_of_job
from undula.errors import SpecError
from undula.masking.values import declared_in
from undula.telemetry.live import LiveScreen


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("pip: [einops]\nworking_dir: .", "env.yaml:2: Undula sets working_dir itself, and it is the folder of the script"),
        ("worker_process_setup_hook: a.b", "env.yaml:1: Undula sets worker_process_setup_hook itself"),
        ("env_vars: {A: '1', PYTHONHASHSEED: '1'}", "env.yaml:1: Undula sets PYTHONHASHSEED itself; remove it"),
        ("env_vars: {MALLOC_ARENA_MAX: '2'}", "env.yaml:1: Undula sets MALLOC_ARENA_MAX itself; remove it from env_vars"),
        ("env_vars: {UNDULA_RUNS: /runs}", "env.yaml:1: Undula sets UNDULA_RUNS itself; remove it from env_vars"),
        ("env_vars: {DB_PASSWORD: 47211}", "env.yaml:1: env_vars.DB_PASSWORD is not a text; quote its value"),
        ("exclude: [data]", "env.yaml:1: a runtime environment of Ray has no key exclude: did you mean excludes?"),
        ("pip: 3", "env.yaml: Ray does not accept this runtime environment: runtime_env['pip'] must be of type str"),
        ("pip: none.txt", "env.yaml: Ray does not accept this runtime environment: none.txt is not a valid file"),
        ("py_modules: [/none]", "env.yaml: Ray does not accept this runtime environment: /none is not a valid path"),
        ("pip: ['--index-url https://me:hunter2x@host/simple']", "env.yaml:1: pip has a secret in it, which Ray's list"),
        ("- pip", "a runtime environment of Ray is a mapping"),
    ],
)  # fmt: skip
def test_what_a_job_cannot_have_is_refused_in_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "env.yaml").write_text(text)
    with pytest.raises(SpecError) as error:
        load_runtime_env(tmp_path / "env.yaml")
    assert sentence in str(error.value)
    assert not {"47211", "hunter2x"} & set(str(error.value).replace(":", " ").split())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["pip", "uv"])
def test_a_secret_in_a_file_of_packages_is_refused(tmp_path: Path, key: str) -> None:
    (tmp_path / "packages.txt").write_text("--index-url https://me:hunter2x@host/simple\neinops\n")
    (tmp_path / "env.yaml").write_text(f"{key}: {tmp_path}/packages.txt")
    with pytest.raises(SpecError, match=rf"env.yaml:1: {key} has a secret in it, which Ray's list of jobs would show"):
        load_runtime_env(tmp_path / "env.yaml")


def test_a_key_without_a_value_is_as_none(tmp_path: Path) -> None:
    (tmp_path / "env.yaml").write_text("pip: []\nconda:\nenv_vars:  # none yet\n")
    assert load_runtime_env(tmp_path / "env.yaml") == {"pip": []}


def test_variables_refer_to_others_on_a_cluster_of_its_own_as_on_each(
    submission: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("undula.driver.submission.cluster_at_hand", lambda: None)
    monkeypatch.setenv("MODE", "slow")
    monkeypatch.setenv("HOSTS", "a")
    monkeypatch.delenv("NONE", raising=False)
    started: list[Any] = []
    monkeypatch.setattr("undula.driver.submission.run_on_own_cluster", lambda *given: started.append(given) or 0)
    variables = {"MODE": "fast", "HOSTS": "${HOSTS},b$MODE$NONE${NONE}", "LATER": "${HOSTS}!"}
    submission = replace(submission, runtime_env={}, check_here=lambda _arguments: False)
    submission = submission.with_environment(variables, {"env_vars": variables})
    assert run_submission(submission, None, LiveScreen(io.StringIO()), "follow") == 0
    for given in started[0][2:4]:
        assert {name: given[name] for name in variables} == {
            "MODE": "fast",
            "HOSTS": "a,bfast$NONE",
            "LATER": "a,bfast$NONE!",
        }


def test_the_keys_that_undula_sets_are_those_of_ray() -> None:
    assert {"working_dir", "worker_process_setup_hook", "env_vars", "py_modules", "excludes"} <= RuntimeEnv.known_fields


@pytest.fixture
def submission(tmp_path: Path) -> Submission:
    """Submission of a script with a runtime environment whose variables include two secrets."""
    files = {
        "jobs/job.yaml": "name: job\nruns: /runs\ndata: {train: /data}\n",
        "jobs/job.py": "import mine, solitary",
        "lib/solitary.py": "",
        "jobs/data/big.bin": "excluded",
        "lib/mine/__init__.py": "",
        "lib/mine/data/__init__.py": "sent, although a folder of this name is excluded beside the script",
        "more/extra/__init__.py": "",
        "env.yaml": f"pip: [einops]\nexcludes: [data]\npy_modules: [{tmp_path}/more/extra]\n"
        "env_vars: {LEVEL: file, MODE: fast, DB_PASSWORD: hunter2x, LOGIN: 'https://me:hunter3x@host'}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    job, runtime_env = tmp_path / "jobs" / "job.yaml", load_runtime_env(tmp_path / "env.yaml")
    environment = job_environment(["LEVEL=given"], [], [], runtime_env["env_vars"])
    plain = submission_of_job(job, load_spec(job), (), None, fresh=False, project=tmp_path / "lib")
    return plain.with_environment(environment, runtime_env)


class Head(submit.JobApi):
    """Job API that accepts everything."""

    def __init__(self) -> None:
        self.packages: list[bytes] = []
        self.posted: dict[str, Any] = {}
        self._client_ray_version, self._default_metadata = "2.60", {}

    def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:  # type: ignore[override]
        if method == "PUT":
            self.packages.append(options["data"])
        if method == "POST":
            self.posted = options["json_data"]
        body = {"job_id": "raysubmit_1", "submission_id": "raysubmit_1"}
        return SimpleNamespace(status_code=404 if method == "GET" else 200, text="does not exist", json=lambda: body)

    def get_job_info(self, job_id: str) -> Any:
        raise RuntimeError(f"Request failed with status code 404: Job {job_id} does not exist.")


def test_ray_gets_packages_variables_and_files(submission: Submission, monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head()
    monkeypatch.setattr("undula.driver.submit.connect", lambda dashboard: head)
    assert run_submission(submission, "http://head:8265", LiveScreen(io.StringIO()), "detach") == 0
    sent = head.posted["runtime_env"]
    assert sent["pip"]["packages"] == ["einops"]
    assert (sent["env_vars"]["LEVEL"], sent["env_vars"]["MODE"]) == ("given", "fast")
    assert len(sent["py_modules"]) == 4
    assert "hunter" not in json.dumps(head.posted)
    secret, *packages = head.packages
    assert json.loads(secret)["DB_PASSWORD"] == "hunter2x"
    assert "MODE" not in json.loads(secret), "a variable that Ray adds to, such as PYTHONPATH, would be set again"
    assert {"DB_PASSWORD", "LOGIN"} <= declared_in(json.loads(secret)).keys()
    names = {name for package in packages for name in zipfile.ZipFile(io.BytesIO(package)).namelist()}
    assert {"job.py", "solitary.py", "mine/data/__init__.py", "extra/__init__.py", "undula/data/spec.py"} <= names
    assert not [name for name in names if "big.bin" in name]


def test_without_a_cluster_what_only_ray_installs_is_refused(
    submission: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("undula.driver.submission.cluster_at_hand", lambda: None)
    with pytest.raises(SpecError, match=r"--runtime-env: pip has an effect only on a cluster that has started before"):
        run_submission(submission, None, LiveScreen(io.StringIO()), "follow")
    with pytest.raises(SpecError, match=r"--runtime-env: pip has an effect only on a cluster that has started before"):
        run_in_this_process(submission)
