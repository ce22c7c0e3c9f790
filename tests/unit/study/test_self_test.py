"""Tests of `undula study self-test`: it passes within a minute, and fails if a number is wrong."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from undula.cli.main import main
from undula.study import self_test
from undula.study.self_test import SelfTestResult, table

DOCS = Path(__file__).parents[3] / "docs" / "studies.md"


def test_every_check_passes_within_a_minute_and_the_docs_show_them() -> None:
    started = time.process_time()  # independent of other load on the machine
    checks = list(self_test.self_test())
    assert time.process_time() - started < 60
    assert [check.what for check in checks if not check.passed] == []
    shown = DOCS.read_text()
    assert all(check.what in shown for check in checks)
    assert re.search(rf"{len(checks)} passed, 0 failed", shown)


def test_a_wrong_number_fails() -> None:
    assert SelfTestResult("topic", "what", 100.0, 101.0, 0.01).passed
    assert not SelfTestResult("topic", "what", 100.0, 101.1, 0.01).passed
    assert not SelfTestResult("topic", "what", 100.0, float("nan"), 0.01).passed
    assert not SelfTestResult("topic", "what", -1.0, 1.0, 0.5).passed


def test_table_names_each_topic_once() -> None:
    checks = [
        SelfTestResult("A", "one", 1507368, 1508044, 0.001),
        SelfTestResult("A", "two", 2, 2.5, 0.02),
        SelfTestResult("B", "three", 1, 1, 0.1),
    ]
    assert table(checks).splitlines() == [
        "          expected        got  within",
        "A",
        "  one    1,507,368  1,508,044    0.1%  pass",
        "  two            2        2.5    2.0%  FAIL",
        "B",
        "  three          1          1   10.0%  pass",
    ]


@pytest.mark.parametrize(("known", "status"), [(2.0, 0), (2.1, 1)])
def test_exit_status_says_whether_one_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], known: float, status: int
) -> None:
    monkeypatch.setattr(self_test, "TOPICS", {"Gains": lambda: iter([("gain", known, 2.0, 0.01)])})
    with pytest.raises(SystemExit) as ended:
        main(["study", "self-test"])
    assert ended.value.code == status
    assert ("FAIL" in capsys.readouterr().out) == bool(status)
    with pytest.raises(SystemExit) as ended:
        main(["study", "self-test", "--json"])
    assert ended.value.code == status
    assert json.loads(capsys.readouterr().out)[0]["passed"] is not bool(status)


def test_without_the_extra_the_message_has_the_install_command() -> None:
    hide = "import sys; sys.modules['scipy'] = None; from undula.cli.main import main; main(['study', 'self-test'])"
    done = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "undula: scipy is not installed; run pip install 'undula[study]'\n")
