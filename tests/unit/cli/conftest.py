"""Fixture that runs commands in this process."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from undula.cli.main import main


@dataclass(frozen=True)
class Ended:
    """Result of a command."""

    status: int
    out: str
    err: str

    @property
    def shown(self) -> str:
        """Everything that the command has written to the terminal."""
        return self.out + self.err


Command = Callable[..., Ended]


@pytest.fixture
def undula(capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs `undula` with some arguments."""

    def run(*arguments: object) -> Ended:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ended(int(ended.value.code or 0), captured.out, captured.err)

    return run
