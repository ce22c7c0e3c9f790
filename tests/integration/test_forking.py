"""Test of the interpreter of test clusters: workers are forks of one process, but they draw different ids, and drivers are forks, too."""

import json
import os
import subprocess
from pathlib import Path

from undula.cluster.local import LocalCluster

DRIVER = """
import json, logging, os, sys
has_torch = "torch" in sys.modules
import ray

class Worker:
    def look(self):
        import sys
        from ray._raylet import WorkerID
        return os.getppid(), "ray.train" in sys.modules, "undula" in sys.modules, WorkerID.from_random().hex()

ray.init(log_to_driver=False, logging_level=logging.ERROR)
workers = [ray.remote(Worker).remote() for _ in range(2)]
print(json.dumps([has_torch, *ray.get([worker.look.remote() for worker in workers])]))
"""


def test_workers_are_forks_that_have_torch_and_draw_different_ids(cluster: LocalCluster, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    env = {**os.environ, **cluster.env, "RAY_ADDRESS": cluster.address}
    done = subprocess.run([cluster.python, str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    driver_has_torch, one, other = json.loads(done.stdout)
    assert driver_has_torch
    parent, has_ray_train, has_undula, drawn = one
    assert other[:3] == [parent, has_ray_train, has_undula]
    assert (has_ray_train, has_undula) == (True, False)
    assert other[3] != drawn
