"""Tests of process identities, and of signals that reach only the process that is meant."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import psutil
import pytest
from waiting import wait_until

from undula.state.processes import (
    descendants,
    end_group,
    find_process,
    identity_of,
    is_alive,
    is_known_to_have_ended,
    kill_tree,
    own_identity,
    send_signal,
    signal_group,
)

PARENT = """
import subprocess, sys
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
child.wait()
"""
IDENTITY = """
import json
from dataclasses import asdict
from undula.state.processes import own_identity
print(json.dumps(asdict(own_identity())), flush=True)
input()
"""


@contextmanager
def sleeper() -> "Iterator[subprocess.Popen[bytes]]":
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_an_identity_finds_its_process_until_that_has_ended() -> None:
    with sleeper() as process:
        identity = identity_of(process)
        assert identity == identity_of(psutil.Process(process.pid)) != own_identity()
        found = find_process(identity)
        assert found is not None
        assert found.pid == process.pid
        assert not is_known_to_have_ended(identity)
    assert find_process(identity) is None
    assert is_known_to_have_ended(identity)


def test_a_process_that_has_received_the_id_of_another_one_is_not_found() -> None:
    own = own_identity()
    former = replace(own, started=own.started - 1)
    assert find_process(former) is None
    assert is_known_to_have_ended(former)


def test_nothing_is_known_of_a_process_in_another_namespace() -> None:
    with sleeper() as process:
        identity = identity_of(process)
    for namespace in ("elsewhere", ""):
        for each in (replace(identity, namespace=namespace), replace(own_identity(), namespace=namespace)):
            assert find_process(each) is None
            assert not is_known_to_have_ended(each)


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a process namespace of its own")
def test_a_process_in_a_container_that_shares_the_hostname_is_never_a_process_outside() -> None:
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", IDENTITY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as inner:
        assert inner.stdout is not None
        identity = replace(own_identity(), **json.loads(inner.stdout.readline()))
        assert identity.pid == 1
        assert find_process(identity) is None
        assert not is_known_to_have_ended(identity)


def test_a_child_that_was_waited_for_gets_no_signal() -> None:
    with sleeper() as stranger, sleeper() as child:
        child.kill()
        child.wait()
        child.pid = stranger.pid  # the system has given its id to another process
        for send in (send_signal, signal_group):
            send(child, signal.SIGKILL)
        kill_tree(child)
        assert descendants(child) == []
        assert not is_alive(child)
        assert is_alive(stranger)


def test_kill_tree_ends_a_process_and_all_its_descendants() -> None:
    command = [sys.executable, "-c", f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {PARENT!r}])"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as root:
        assert root.stdout is not None
        grandchild = int(root.stdout.readline())
        tree = descendants(root)
        assert len(tree) == 2
        assert grandchild in [each.pid for each in tree]
        kill_tree(root)
        assert root.wait(10) == -9
    wait_until(lambda: not any(map(is_alive, tree)))
    assert descendants(root) == []


def test_a_group_is_ended_with_the_processes_that_outlive_its_leader() -> None:
    """The leader ends, but is not waited for before its group has been killed, because its id could then be that of another group."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        member = psutil.Process(int(leader.stdout.readline()))
        send_signal(leader, signal.SIGKILL)
        wait_until(lambda: not is_alive(leader))
        assert is_alive(member)
        end_group(leader, patience_s=10)
        assert leader.returncode == -9
    wait_until(lambda: not is_alive(member))


def test_a_leader_that_ignores_sigterm_is_killed() -> None:
    script = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True) as leader:
        assert leader.stdout is not None
        leader.stdout.readline()
        end_group(leader, patience_s=0.1)
        assert leader.returncode == -9
