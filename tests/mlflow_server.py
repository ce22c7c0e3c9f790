"""MLflow's own server in a process of this machine, with its tables in SQLite.

The server needs all of MLflow, whose pins differ from those of this project. So it runs from a virtual environment of its own: set
UNDULA_TEST_MLFLOW to the path of the `mlflow` command there. Tests are skipped without it, and without `undula[mlflow]` beside them.
"""

import os
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from waiting import wait_until

from undula.state.processes import signal_group

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

COMMAND = os.environ.get("UNDULA_TEST_MLFLOW", "")
EXPERIMENT = "undula"


class MlflowServer:
    """Server that can be stopped and started again at the same address.

    Args:
        folder: Folder of its tables.
    """

    def __init__(self, folder: Path):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.tables = folder / "mlflow.sqlite"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [COMMAND, "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        tables = ["--backend-store-uri", f"sqlite:///{self.tables}", "--artifacts-destination", str(self.tables.parent)]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [*command, *tables],
            env={**env, "MLFLOW_DISABLE_TELEMETRY": "true"},
            cwd=self.tables.parent,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_until(self._is_up, limit_s=180)

    def stop(self) -> None:
        """Kill the server and its workers."""
        if self._process is not None:
            signal_group(self._process, 9)
            self._process.wait()
            self._process = None

    def client(self) -> "MlflowClient":
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=self.url)

    def runs(self) -> "list[Run]":
        """Return the runs of the server."""
        client = self.client()
        experiment = client.get_experiment_by_name(EXPERIMENT)
        return list(client.search_runs([experiment.experiment_id])) if experiment else []

    def only_run(self) -> "Run":
        """Return the run of the server, which must have one."""
        (run,) = self.runs()
        return run

    def history(self, metric: str) -> list[tuple[int, float]]:
        """Return the steps and values of a metric of the only run, by step."""
        found = self.client().get_metric_history(self.only_run().info.run_id, metric)
        return sorted((point.step, point.value) for point in found)

    def times(self, metric: str) -> list[tuple[int, int]]:
        """Return the steps and times of a metric of the only run, in milliseconds since the epoch, by step."""
        found = self.client().get_metric_history(self.only_run().info.run_id, metric)
        return sorted((point.step, point.timestamp) for point in found)

    def _is_up(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, "MLflow's server has ended"
        with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
            return True
        return False


@contextmanager
def mlflow_server(folder: Path) -> Iterator[MlflowServer]:
    """Start a server for a block, or skip the test if MLflow is not installed."""
    pytest.importorskip("mlflow")
    if shutil.which(COMMAND) is None:
        pytest.skip("UNDULA_TEST_MLFLOW does not name the command of a complete MLflow")
    server = MlflowServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()
