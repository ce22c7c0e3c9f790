"""Detection of the resources that a Ray node on this machine would offer, before a node is started.

Ray's detection runs in a separate process, `python -m undula.elastic.ray.machine CPUS`, because importing Ray takes a second, and because
Ray reads a cluster's token only once, when it is imported.
"""

import json
import subprocess
import sys
from importlib import import_module
from typing import Any

from undula.errors import ClusterError

LIMIT_S = 60.0
"""Maximum seconds for importing Ray and detecting accelerators."""


def machine_resources(num_cpus: int) -> dict[str, float]:
    """Return the resources that `ray start --num-cpus=NUM_CPUS` would offer on this machine, by Ray's names of the resources.

    Raises:
        ClusterError: Ray could not detect the resources, or took too long.
    """
    command = [sys.executable, "-m", "undula.elastic.ray.machine", str(num_cpus)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        return {str(name): float(amount) for name, amount in json.loads(done.stdout.splitlines()[-1]).items()}
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"Ray did not detect the resources of this machine within {LIMIT_S:g} s; try again"
        ) from None
    except subprocess.CalledProcessError as error:
        why = " ".join(str(error.stderr).strip().splitlines()[-1:])
        raise ClusterError(f"Ray cannot detect the resources of this machine: {why}") from None


def main() -> None:
    spec: Any = import_module("ray._private.resource_and_label_spec").ResourceAndLabelSpec
    resolved = spec(num_cpus=int(sys.argv[1])).resolve(is_head=True, node_ip_address="127.0.0.1")
    print(json.dumps(resolved.to_resource_dict()))


if __name__ == "__main__":
    main()
