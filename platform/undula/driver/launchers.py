"""Launchers that start a script once for each rank, such as torchrun. A job starts its workers itself and has one driver, so that only the
first of these processes goes on."""

import os
import re
import sys
from dataclasses import dataclass

from undula.cluster.local import cluster_at_hand
from undula.errors import ClusterError


@dataclass(frozen=True)
class _Launcher:
    """A launcher, by the environment variables that it sets."""

    name: str
    rank: str
    """Variable with the rank of a process."""
    size: str
    """Variable with the number of processes."""
    local_size: str = ""
    """Variable with the number of processes on this node."""
    nodes: str = ""
    """Variable with the number of nodes."""
    mark: str = ""
    """Variable that this launcher alone sets, if others have the same ones."""


_LAUNCHERS = (
    _Launcher("accelerate launch", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", mark="ACCELERATE_MIXED_PRECISION"),
    _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", mark="TORCHELASTIC_RUN_ID"),
    _Launcher("deepspeed", "RANK", "WORLD_SIZE", nodes="CROSS_SIZE", mark="CROSS_SIZE"),
    _Launcher("a launcher", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    _Launcher("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"),
    _Launcher("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    _Launcher("mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
    _Launcher("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    # A batch script has SLURM_PROCID and SLURM_NTASKS as well, but only a step of srun has the number of its own tasks.
    _Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", nodes="SLURM_STEP_NUM_NODES"),
)
"""Launchers, of which the first one that fits has started this process: srun or mpirun may have started the others."""
_OF_RANKS = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_(RANK|WORLD_SIZE|SIZE)|NODE_RANK|MASTER_(ADDR|PORT)|(GROUP|ROLE)_(RANK|WORLD_SIZE)|CROSS_(RANK|SIZE)"
    r"|TORCHELASTIC_\w+|HOROVOD_(LOCAL_|CROSS_)?(RANK|SIZE)|(OMPI|MV2)_COMM_WORLD_\w+|PMI_(RANK|SIZE)|MPI_LOCAL\w+"
    r"|SLURM_(PROCID|LOCALID|NTASKS|STEP_NUM_TASKS)"
)
"""Variables about the ranks of a launcher, for which libraries in the driver and its workers would wait."""
_IN_RAY = ("RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_RAYLET_PID")
"""Variables of processes that Ray has started. Those about ranks are then of the node: a launcher has started Ray there."""


@dataclass(frozen=True)
class Launch:
    """Several processes that a launcher has started, of which this one is the first."""

    by: str
    """Name of the launcher."""
    has_nodes: bool
    """Whether they are on several nodes."""

    def require_cluster(self) -> None:
        """Check that workers can be on more than this node, if the processes are.

        Raises:
            ClusterError: They cannot.
        """
        if self.has_nodes and not os.environ.get("RAY_ADDRESS") and not cluster_at_hand():
            raise ClusterError(
                f"{self.by} has started the script on several nodes, but workers are on the nodes of a Ray cluster, and there is none; "
                "start one with `ray start` on each of these nodes, and then the script once, with `undula run JOB.yaml`"
            )


def end_all_but_first() -> Launch | None:
    """End this process if a launcher has started it as another one than the first; the first one says so, if there are others.

    The variables about ranks are deleted, because workers would inherit them.

    Returns:
        The processes; None if this one is alone.

    Raises:
        SystemExit: This process is not the first one. Its status is 0, with which no launcher stops the others.
    """
    launcher = next(filter(_has_started_this, _LAUNCHERS), None)
    if launcher is None:
        return None
    rank, size = int(os.environ[launcher.rank]), int(os.environ[launcher.size])
    local_size, nodes = os.environ.get(launcher.local_size, size), os.environ.get(launcher.nodes, 1)
    for name in [name for name in os.environ if _OF_RANKS.fullmatch(name)]:
        del os.environ[name]
    if rank:
        raise SystemExit
    if size == 1:
        return None
    print(
        f"undula: {launcher.name} has started {size} processes, but a run has workers of its own (workers.min and workers.max in the "
        "YAML); this process goes on as the driver of the job, and the others have ended; start it once, with `undula run JOB.yaml`",
        file=sys.stderr,
        flush=True,
    )
    return Launch(launcher.name, int(local_size) < size or int(nodes) > 1)


def _has_started_this(launcher: _Launcher) -> bool:
    numbers = os.environ.get(launcher.rank, ""), os.environ.get(launcher.size, "")
    is_of_ray = any(name in os.environ for name in _IN_RAY) and "TORCHELASTIC_RUN_ID" not in os.environ
    return all(map(str.isdecimal, numbers)) and launcher.mark in ("", *os.environ) and not is_of_ray
