"""Tests of scripts that a launcher starts once for each rank, by the variables that it sets: the first process is the driver."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from forked import run_script

SCRIPT = """
import os
import undula
from undula import study_main
from undula.adapters.accelerate import launch

def main():
    from undula.adapters.accelerate import Accelerator
    Accelerator()
    raise SystemExit("the script has run up to its training, with " + ",".join(sorted(os.environ)))

if __name__ == "__main__":
    CALL
    print("after the call")
"""
CALLS = ("undula.main(lambda run: None)", "launch(main)", "study_main(['study.yaml'])")
LAUNCHED: Mapping[str, Mapping[str, str]] = {
    "torchrun": {
        "RANK": "R",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "R",
        "LOCAL_WORLD_SIZE": "3",
        "TORCHELASTIC_RUN_ID": "x",
    },
    "accelerate launch": {
        "RANK": "R",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "R",
        "LOCAL_WORLD_SIZE": "3",
        "TORCHELASTIC_RUN_ID": "x",
        "ACCELERATE_MIXED_PRECISION": "no",
    },
    "deepspeed": {"RANK": "R", "WORLD_SIZE": "3", "LOCAL_RANK": "R", "LOCAL_SIZE": "3", "CROSS_SIZE": "1"},
    "mpirun": {"OMPI_COMM_WORLD_RANK": "R", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"},
    "mpirun ": {"PMI_RANK": "R", "PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"},
    "srun": {"SLURM_PROCID": "R", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "1", "SLURM_NTASKS": "3"},
    "a launcher": {"RANK": "R", "WORLD_SIZE": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
}
"""Variables of each launcher; R is the rank."""
SEVERAL_NODES = {"torchrun": "LOCAL_WORLD_SIZE", "mpirun": "OMPI_COMM_WORLD_LOCAL_SIZE", "srun": "SLURM_STEP_NUM_NODES"}
"""Variable of a launcher that is 2 if three processes are on two nodes."""


@pytest.fixture(autouse=True)
def no_cluster_and_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Accelerator that an earlier test of this process has made leaves variables of its launcher behind."""
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name in {name for variables in LAUNCHED.values() for name in variables}:
        monkeypatch.delenv(name, raising=False)


def started(folder: Path, call: str, env: Mapping[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    script = folder / "job.py"
    script.write_text(SCRIPT.replace("CALL", call))
    script.with_suffix(".yaml").write_text(f"name: job\nruns: {folder}/runs\n")
    return run_script(folder, script, arguments, env)


def of_rank(launcher: str, rank: int) -> dict[str, str]:
    return {name: value.replace("R", str(rank)) for name, value in LAUNCHED[launcher].items()}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("launcher", LAUNCHED)
def test_another_process_than_the_first_ends_at_once_without_a_word(tmp_path: Path, launcher: str, call: str) -> None:
    done = started(tmp_path, call, of_rank(launcher, 2), "--no-such-option")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_the_first_process_is_the_driver_and_sees_no_ranks(tmp_path: Path, launcher: str) -> None:
    variables = of_rank(launcher, 0)
    done = started(tmp_path, "launch(main)", variables)
    sentence, ended = done.stderr.splitlines()
    assert sentence.startswith(f"undula: {launcher.strip()} has started 3 processes, but a run has workers of its own")
    assert ended.startswith("the script has run up to its training, with ")
    left = {"ACCELERATE_MIXED_PRECISION", "SLURM_STEP_NUM_NODES"}
    assert not variables.keys() - left & set(ended.rpartition(" ")[2].split(","))


@pytest.mark.parametrize("option", ["--local-rank=0", "--local_rank=0"])
def test_the_argument_of_a_launcher_is_no_mistake(tmp_path: Path, option: str) -> None:
    done = started(tmp_path, CALLS[0], of_rank("deepspeed", 0), option, "--print")
    assert done.returncode == 0, done.stderr
    assert 'name: "job"' in done.stdout


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({"RANK": "0", "WORLD_SIZE": "1"}, id="one process"),
        pytest.param({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "4"}, id="a batch script"),
        pytest.param(
            {**of_rank("srun", 2), "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}, id="a job on a node that srun started"
        ),
        pytest.param({"LOCAL_RANK": "1"}, id="no launcher"),
    ],
)
def test_a_process_that_no_launcher_has_started_beside_others_is_a_driver(
    tmp_path: Path, variables: Mapping[str, str]
) -> None:
    done = started(tmp_path, CALLS[0], variables, "--print")
    assert (done.returncode, done.stderr) == (0, "")
    assert 'name: "job"' in done.stdout


@pytest.mark.parametrize("launcher", SEVERAL_NODES)
@pytest.mark.parametrize("call", [CALLS[0], CALLS[2]])
def test_several_nodes_need_a_cluster(tmp_path: Path, launcher: str, call: str) -> None:
    variables = {**of_rank(launcher, 0), SEVERAL_NODES[launcher]: "2"}
    done = started(tmp_path, call, variables, "--print")
    assert done.returncode == 3
    reason = (
        f"undula: {launcher} has started the script on several nodes, but workers are on the nodes of a Ray cluster"
    )
    assert done.stderr.splitlines()[-1].startswith(reason)
    with_cluster = started(tmp_path, CALLS[0], {**variables, "RAY_ADDRESS": "10.0.0.1:6379"}, "--print")
    assert with_cluster.returncode == 0, with_cluster.stderr


@pytest.mark.parametrize("command", ["run", "study run"])
def test_only_the_first_of_several_commands_goes_on(tmp_path: Path, command: str) -> None:
    def result(rank: int) -> tuple[int, str]:
        arguments = ["-m", "undula.cli", *command.split(), str(tmp_path / "none.yaml")]
        env = {**os.environ, **of_rank("srun", rank)}
        done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True)
        return done.returncode, done.stderr

    assert result(1) == (0, "")
    status, error = result(0)
    assert status == 2
    assert error.startswith("undula: srun has started 3 processes")
