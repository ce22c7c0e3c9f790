"""Test of the end of a machine of a simulated cloud."""

import signal
import subprocess
import sys

ENDS = """
import signal, subprocess, sys
from undula.testing import machine

def send(process, number):
    send_signal(process, number)
    signal.raise_signal(signal.SIGTERM)
    if len(children) == 2:
        children.append(subprocess.Popen(["sleep", "60"]))

send_signal, machine.send_signal = machine.send_signal, send
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
try:
    machine._end_descendants()
finally:
    ended = [child.poll() for child in children]
    for child in children:
        child.kill()
    print(ended)
"""


def test_a_second_sigterm_and_a_late_process_leave_nothing_of_a_machine() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=50)
    assert done.stdout == f"{[-signal.SIGKILL.value] * 3}\n", done.stderr
