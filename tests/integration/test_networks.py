"""Tests on machines with several networks, whose names resolve to the loopback. They are namespaces, which only root may make."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from networks import DATA, OTHER, Machines, address_of, can_make_machines, machines
from small_text import MODEL, PLAN

CONTAINED = ("unshare", "--pid", "--fork", "--mount-proc")
"""Command that runs another one where it sees no other processes, as a container beside Ray's in a pod does."""
ASK = "import os, sys, json; from undula.elastic.ray.gcs import Head; print(json.dumps(Head(sys.argv[1], os.environ, 60).ask(sys.argv[2])))"
ROOT = Path(__file__).parents[2]
JOB = (
    *MODEL,
    *PLAN,
    "workers.min=2",
    "workers.max=2",
    "workers.max_failures=0",
    "plan.max_steps=4",
    "data.validation=null",
)
SPOT = (sys.executable, "-m", "undula.cli", "spot", "leave", "--notice", "60")


@pytest.fixture
def network() -> Iterator[Machines]:
    """Two machines without nodes."""
    if not can_make_machines():
        pytest.skip("this process may not make network namespaces")
    with machines(), TemporaryDirectory(prefix="undula-", dir="/tmp") as folder:
        yield Machines(Path(folder))


def done(process: "subprocess.Popen[str]") -> tuple[str, int]:
    """Return the last line of the output of a process, and its exit status."""
    out, _ = process.communicate(timeout=200)
    return out.splitlines()[-1], process.returncode


@pytest.mark.nightly
def test_the_nodes_of_a_machine_are_found_at_any_of_its_addresses(network: Machines) -> None:
    with network.node(1), network.node(2):

        def ask(number: int, *command: str, container: tuple[str, ...] = CONTAINED) -> str:
            return done(network.start(number, *container, *command))[0]

        addresses = json.loads(ask(1, sys.executable, "-c", ASK, network.address, "addresses"))
        nodes = {address: node for node, address in addresses.items()}
        for number in (1, 2):  # neither address is that of the default route
            here = json.loads(ask(number, sys.executable, "-c", ASK, network.address, "here"))
            assert here == [nodes[address_of(number)]]
        # All raylets run on this computer, which a process sees that has no container of its own.
        seen = json.loads(ask(1, sys.executable, "-c", ASK, network.address, "here", container=()))
        assert sorted(seen) == sorted(addresses)

        refused = ask(1, *SPOT, "--cluster", network.address, "--node", "10.0.0.9")
        assert (
            "no node of the cluster has the address 10.0.0.9; the addresses of its nodes are 10.78.0.1, 10.78.0.2"
            in refused
        )
        left = ask(1, *SPOT, "--cluster", network.address, "--node", address_of(2))
        assert left == f"Ray drains {nodes[address_of(2)][:8]}"


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_ranks_use_the_interface_of_their_node_although_its_name_resolves_to_the_loopback(
    network: Machines, text: str, tmp_path: Path
) -> None:
    with network.node(1), network.node(2):

        def train(name: str, *settings: str) -> str:
            """Train on both machines, and return what the job prints."""
            job = (sys.executable, str(ROOT / "jobs" / "language_model.py"), f"name={name}", f"runs={tmp_path}")
            driver = network.start(
                1, *job, f"data.train={text}/train", *JOB, *settings, env={"RAY_ADDRESS": network.address}
            )
            return driver.communicate(timeout=280)[0]

        assert "finished" in train("default")
        unconnected = " ".join(train("unconnected", f"workers.interfaces=[none0, {OTHER}]").split())
        assert "does not reach 10.79." in unconnected, unconnected
        assert f"the address of the interface {OTHER} of node 10.78.0." in unconnected
        assert f"set workers.interfaces to the network interfaces that connect the nodes (here: {DATA}, " in unconnected
        unknown = " ".join(train("unknown", "workers.interfaces=[eth5]").split())
        assert "no worker can train on node 10.78.0." in unknown, unknown
        assert "this node has no network interface eth5; set workers.interfaces to interfaces of all nodes" in unknown
