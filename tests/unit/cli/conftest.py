"""Runs commands in this process."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from undula.cli.main import main


@dataclass(frozen=True)
class Said:
    """A command that has ended."""

    status: int
    out: str
    err: str


Command = Callable[..., Said]


@pytest.fixture
def undula(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `undula` with some arguments."""

    def run(*arguments: object) -> Said:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Said(int(ended.value.code or 0), captured.out, captured.err)

    return run
