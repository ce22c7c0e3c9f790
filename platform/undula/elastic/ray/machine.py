"""Asks Ray what a node on this machine would offer, before one is started.

Ray's own detection runs in a process of its own, `python -m undula.elastic.ray.machine CPUS`: it takes a second to import Ray, and Ray
reads a cluster's token once, when it is imported.
"""

import json
import subprocess
import sys
from importlib import import_module
from typing import Any

from undula.errors import ClusterError

LIMIT_S = 60.0
"""Maximum time in seconds for Ray to be imported and to look for accelerators."""


def machine_resources(num_cpus: int) -> dict[str, float]:
    """Resources that `ray start --num-cpus=NUM_CPUS` would offer on this machine, by Ray's names.

    Raises:
        ClusterError: Ray could not say.
    """
    command = [sys.executable, "-m", "undula.elastic.ray.machine", str(num_cpus)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        return {str(name): float(amount) for name, amount in json.loads(done.stdout.splitlines()[-1]).items()}
    except subprocess.TimeoutExpired:
        raise ClusterError(f"Ray did not say within {LIMIT_S:g} s which resources this machine has") from None
    except subprocess.CalledProcessError as error:
        why = " ".join(str(error.stderr).strip().splitlines()[-1:])
        raise ClusterError(f"Ray cannot tell which resources this machine has: {why}") from None


def main() -> None:
    spec: Any = import_module("ray._private.resource_and_label_spec").ResourceAndLabelSpec
    resolved = spec(num_cpus=int(sys.argv[1])).resolve(is_head=True, node_ip_address="127.0.0.1")
    print(json.dumps(resolved.to_resource_dict()))


if __name__ == "__main__":
    main()
