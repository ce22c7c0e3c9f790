"""Tests of jobs on a node whose GPU Ray counts and torch does not see, as with a build of torch for CPUs. A label tells its memory."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from forked_drivers import with_forked_drivers
from jobs_kit import LANGUAGE_MODEL, Jobs, job_json

from undula.cluster.local import LocalCluster, local_cluster
from undula.plan.fleet import GPU_GIB
from undula.state.ledger import decode_events

SCRIPT = """
import os

import language_model
import undula
from language_model import Config

def train(run):
    print("GPUs:", repr(os.environ.get("CUDA_VISIBLE_DEVICES")), "device:", run.device)
    language_model.train(run)

if __name__ == "__main__":
    undula.main(train, config=Config)
"""


@pytest.fixture(scope="module")
def with_a_gpu(forking_python: str) -> Iterator[LocalCluster]:
    """Cluster of one node for which Ray counts one GPU, of 8 GiB."""
    env = {
        "RAY_OVERRIDE_RESOURCES": '{"GPU": 1, "accelerator_type:T4": 1}',
        "RAY_OVERRIDE_LABELS": json.dumps({GPU_GIB: "8"}),
    }
    with local_cluster(num_cpus=2, env=env, python=forking_python) as running:
        yield with_forked_drivers(running)


@pytest.fixture
def jobs(with_a_gpu: LocalCluster, text: str, tmp_path: Path) -> Jobs:
    shutil.copytree(LANGUAGE_MODEL.parent, tmp_path / "job")
    script = tmp_path / "job" / "printing.py"
    script.write_text(SCRIPT)
    shutil.copy(LANGUAGE_MODEL.with_suffix(".yaml"), script.with_suffix(".yaml"))
    return replace(Jobs(with_a_gpu, text, str(tmp_path / "runs")), script=script)


def test_a_gpu_that_torch_does_not_see_ends_the_start_with_one_sentence(jobs: Jobs) -> None:
    done = jobs.run("refused", "plan.max_steps=4")
    assert done.status == 3
    assert "starting 1 to 2 workers with 1 GPU each ..." in done.out
    (sentence,) = done.err.splitlines()
    assert sentence.startswith("undula: no worker can train on node ")
    assert "Ray has reserved 1 GPU, but torch " in sentence
    assert sentence.endswith("install a build of torch with CUDA on the node, or set workers.gpus=0 to train on CPUs")
    assert job_json(done.store)["spec"]["workers"]["gpus"] == 1.0
    assert done.ledger.steps.num_rows == 0
    assert "crash" not in done.ledger.events["kind"].to_pylist(), "the start was tried again"


def test_a_worker_without_a_gpu_trains_on_the_cpu_and_sees_no_gpu(jobs: Jobs) -> None:
    done = jobs.run("cpus", "plan.max_steps=4", "workers.gpus=0")
    assert done.status == 0, done.err
    assert "starting 1 to 2 workers without a GPU ..." in done.out
    assert "GPUs: '' device: cpu" in done.out
    assert done.column("step") == list(range(4))
    assert job_json(done.store)["spec"]["workers"]["gpus"] == 0.0


LARGE = ("workers.check_memory=true", "config.model.layers=12", "config.model.width=768", "plan.global_batch=3072")
"""Settings with which a step of the main job does not fit into 8 GiB."""


def test_a_job_that_does_not_fit_is_refused_before_a_worker_starts_and_what_it_names_fits(jobs: Jobs) -> None:
    refused = jobs.run("large", *LARGE)
    assert refused.status == 2
    assert "starting" not in refused.out
    (sentence,) = refused.err.splitlines()
    named = re.search(r"but the cluster's T4 has 8.0 GiB; set (.*), which needs ([\d.]+) GiB$", sentence)
    assert named, sentence
    assert float(named[2]) <= 8.0
    assert not refused.store.exists("job.json"), "a run has begun"

    fitting = jobs.run("fitting", *LARGE, *named[1].split())
    assert "starting 1 to 2 workers with 1 GPU each ..." in fitting.out
    (estimate,) = (event for event in decode_events(fitting.ledger.events) if event.kind == "estimate")
    assert f"expected to need {named[2]} GiB of the 8.0 GiB of T4" in estimate.message
