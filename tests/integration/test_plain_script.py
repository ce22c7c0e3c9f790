"""Test of a script that uses Ray Train's API under ElasticTorchTrainer and loses a worker."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from undula.cluster.local import LocalCluster

SCRIPT = """
import json, signal, sys, tempfile
from pathlib import Path

import ray, ray.train, ray.train.torch, torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
import undula

def train(config):
    context = ray.train.get_context()
    model = ray.train.torch.prepare_model(torch.nn.Linear(2, 1))
    checkpoint = ray.train.get_checkpoint()
    start = json.loads((Path(checkpoint.path) / "step.json").read_text()) if checkpoint else 0
    for step in range(start, 8):
        model(torch.ones(4, 2)).sum().backward()
        marker = Path(config["folder"]) / "killed"
        if step == 5 and context.get_world_rank() == 1 and not marker.exists():
            marker.touch()
            signal.raise_signal(signal.SIGKILL)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "step.json").write_text(json.dumps(step + 1))
            ray.train.report({"step": step, "start": start}, checkpoint=Checkpoint(folder))

if __name__ == "__main__":
    ray.init(log_to_driver=False)
    result = undula.ElasticTorchTrainer(
        train,
        train_loop_config={"folder": sys.argv[1]},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="plain", storage_path=sys.argv[1], failure_config=FailureConfig(max_failures=2)),
    ).fit()
    print("RESULT", json.dumps(result.metrics))
"""


@pytest.mark.nightly
def test_a_plain_script_resumes_from_its_last_reported_checkpoint(cluster: LocalCluster, tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(SCRIPT)
    env = {**os.environ, **cluster.env, "RAY_ADDRESS": cluster.address}
    command = [cluster.python, str(script), str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    metrics = json.loads(line.removeprefix("RESULT "))
    assert metrics["step"] == 7
    assert 1 <= metrics["start"] <= 5  # the last report may not have been collected when its worker was killed
    assert (tmp_path / "killed").exists()
