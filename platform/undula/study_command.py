"""`undula study`: its commands, and what they print."""

import argparse
import json
from dataclasses import asdict
from typing import Any

from undula.errors import SpecError


def add_study_commands(commands: Any) -> None:
    """Of the command line."""
    text = "check the arithmetic of studies against known numbers and sampling; exit status 1 where one is off"
    test = commands.add_parser("self-test", help=text)
    test.add_argument("--json", action="store_true")
    test.set_defaults(command=_self_test)


def _self_test(options: argparse.Namespace) -> int:
    try:
        from undula.study.self_test import self_test, table
    except ModuleNotFoundError as error:
        raise SpecError(f"{str(error.name).split('.')[0]} is not installed: pip install 'undula[study]'") from error

    checks = list(self_test())
    failed = sum(not check.passed for check in checks)
    if options.json:
        print(json.dumps([{**asdict(check), "passed": check.passed} for check in checks], indent=1))
    else:
        print(table(checks))
        print(f"{len(checks) - failed} passed, {failed} failed")
    return int(failed > 0)
