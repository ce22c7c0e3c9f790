"""Tests of process trees."""

import subprocess
import sys

import psutil

from undula.testing.nodes import descendants, kill_tree

PARENT = """
import subprocess, sys
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
child.wait()
"""


def test_kill_tree_ends_a_process_and_all_its_descendants() -> None:
    command = [sys.executable, "-c", f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {PARENT!r}])"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as root:
        assert root.stdout is not None
        grandchild = int(root.stdout.readline())
        tree = descendants(root.pid)
        assert len(tree) == 2
        assert grandchild in tree
        found = [psutil.Process(pid) for pid in tree]
        kill_tree(root.pid)
        assert root.wait(10) == -9
    psutil.wait_procs(found, timeout=10)
    assert [each for each in found if each.is_running() and each.status() != psutil.STATUS_ZOMBIE] == []
    assert descendants(root.pid) == []
