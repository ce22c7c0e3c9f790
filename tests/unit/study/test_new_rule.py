"""Test that a rule is one entry of a table: a copy of the package with one more entry knows the rule everywhere."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import undula

ENTRY = """
    "power": Rule(lambda kappa, noise: Scaled(kappa**0.7), Scaled(4.0**0.7), Mark("#a10000", "#ffa1a1", "9 1", "down")),
"""
SCRIPT = """
import json, sys
from study_records import quadratic_records, study
from undula.plan.schedule import ScheduleSpec
from undula.storage import Store
from undula.study.checks.rules import settings
from undula.study.findings import find
from undula.study.render.page import write_report

schedule = ScheduleSpec(batch_rule="power")
spec = study(rules=("none", "power"), optimizers=("sgd", "adamw"), seeds=(0,))
findings = find(spec, quadratic_records(spec, 10_000_000))
found = findings.groups[0]
page = write_report(Store(sys.argv[1]), spec, findings.records)
print(json.dumps({
    "optimizers": [optimizer for optimizer, rule in spec.pairs() if rule == "power"],
    "exponents": {each.rule: each.exponent for each in found.main.laws[0].verdicts},
    "predicted": sorted({each.rule for each in found.predictions}),
    "checks": {what: [known, got] for what, known, got, _ in settings() if what.startswith("power")},
}))
"""


def test_one_entry_makes_a_rule_known_to_settings_studies_figures_and_the_self_test(tmp_path: Path) -> None:
    copy = shutil.copytree(Path(str(undula.__file__)).parent, tmp_path / "undula")
    rules = copy / "plan" / "rules.py"
    head, brace, rest = rules.read_text().partition("RULES: Mapping[str, Rule] = {")
    rules.write_text(head + brace + ENTRY + rest)
    tests = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "study")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), tests, os.environ.get("PYTHONPATH", "")))},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["optimizers"] == ["sgd", "adamw"]
    assert found["exponents"] == {"linear": 1.0, "power": 0.7, "sqrt": 0.5, "none": 0.0}
    assert found["predicted"] == ["linear", "none", "power", "sqrt"]
    assert len(found["checks"]) == 4
    assert all(abs(known - got) < 1e-9 for known, got in found["checks"].values())
    page = (tmp_path / "study" / "report" / "index.html").read_text()
    for text in ("#a10000", "#ffa1a1", "power (0.7)"):
        assert text in page
