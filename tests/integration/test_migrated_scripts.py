"""Tests of scripts of torchrun, Ray Train and Horovod Elastic, before and after, on two real processes: the losses are the same."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from secrets import token_hex

import pytest

from undula.cluster.local import LocalCluster
from undula.config.job import load_spec
from undula.driver.preflight import check_job, examine
from undula.driver.record import job_of
from undula.state.ledger import read_ledger
from undula.storage import open_store
from undula.train.single_process import SingleProcess

FOLDER = Path(__file__).parents[1] / "migration"
LIMIT_S = 300


def losses_of_run(folder: Path, name: str = "ddp_after") -> list[float]:
    """Train a migrated script in this process, and return its losses."""
    train = runpy.run_path(str(FOLDER / f"{name}.py"))["train"]
    loaded = load_spec(FOLDER / f"{name}.yaml", [f"runs={folder}"])
    job = job_of(loaded, token_hex(8), script_data=examine(train, loaded, check_job(loaded)).script_data)
    SingleProcess(train, job, lambda message: None)()
    return list(read_ledger(open_store(job.run_url)).steps["loss"].to_pylist())


def run_script(command: list[str], **variables: str) -> None:
    """Run a script as it was before it was migrated.

    Once in some hundred runs, a thread of torch's process group still lives when a rank's interpreter ends, and C++ aborts
    the process. The script has written its losses by then, so that they are what counts.
    """
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0 or "terminate called without an active exception" in done.stderr, done.stderr[-4000:]


def test_a_script_of_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run_script([*torchrun, str(FOLDER / "ddp_before.py"), str(tmp_path)])
    before = json.loads((tmp_path / "losses.json").read_text())
    assert losses_of_run(tmp_path) == pytest.approx(before, abs=1e-6)


@pytest.mark.nightly
def test_a_script_of_ray_train(cluster: LocalCluster, tmp_path: Path) -> None:
    script = [cluster.python, str(FOLDER / "ray_train_before.py"), str(tmp_path)]
    run_script(script, **cluster.env, RAY_ADDRESS=cluster.address)
    before = json.loads((tmp_path / "losses.json").read_text())
    assert losses_of_run(tmp_path) == pytest.approx(before, abs=1e-6)


@pytest.mark.nightly
def test_a_script_of_horovod_elastic(tmp_path: Path) -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not installed: make horovod")
    hosts = tmp_path / "discover_hosts.sh"
    hosts.write_text("#!/bin/sh\necho localhost:2\n")
    hosts.chmod(0o700)
    # Without a named interface, the launcher waits for a second host.
    options = ["-np", "2", "--min-np", "1", "--network-interface", "lo", "--host-discovery-script", str(hosts)]
    horovodrun = [sys.executable, "-m", "horovod.runner.launch", *options]
    run_script([*horovodrun, sys.executable, str(FOLDER / "horovod_before.py"), str(tmp_path)])
    before = json.loads((tmp_path / "losses.json").read_text())
    assert losses_of_run(tmp_path, "horovod_after") == pytest.approx(before, abs=1e-6)
