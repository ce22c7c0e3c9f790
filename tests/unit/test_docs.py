"""Tests that the docs agree with the code."""

import json
import re
from pathlib import Path

import pytest

from undula.cli.reference import markdown
from undula.config.deepspeed import as_yaml, convert
from undula.config.job import load_spec

ROOT = Path(__file__).parents[2]


def test_the_configuration_reference_is_up_to_date() -> None:
    """If it fails, run `undula schema --markdown > docs/configuration.md`."""
    assert (ROOT / "docs" / "configuration.md").read_text() == markdown()


def test_every_shipped_job_is_valid() -> None:
    jobs = sorted(path for path in (ROOT / "jobs").glob("*.yaml") if path.with_suffix(".py").exists())
    assert [load_spec(path).spec.name for path in jobs] == ["image-classifier", "language-model"]


def test_job_scripts_read_like_examples() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "jobs").glob("*.py")}
    assert lengths.keys() > {"image_classifier.py", "language_model.py"}
    assert {name: length for name, length in lengths.items() if length > 80} == {}


def test_links_between_the_docs_are_valid() -> None:
    links = [
        (page, target)
        for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text())
    ]
    assert (ROOT / "README.md", "docs/quickstart.md") in links
    assert [f"{page.name}: {target}" for page, target in links if not (page.parent / target).exists()] == []


def test_the_documented_conversion_of_a_deepspeed_configuration_is_up_to_date() -> None:
    """If it fails, run `undula convert deepspeed` on the configuration above it."""
    section = (ROOT / "docs" / "sharding.md").read_text().split("## A DeepSpeed configuration that you already have")[1]
    config, printed = (section.split(f"```{language}\n")[1].split("```")[0] for language in ("json", "yaml"))
    assert printed == as_yaml(convert(json.loads(config)), "ds.json")


@pytest.mark.parametrize(("title", "study"), [("**SGD on", "lr-study-sgd"), ("**AdamW on", "lr-study-adamw")])
def test_the_documented_results_of_two_studies_agree_with_their_reports(title: str, study: str) -> None:
    """Only rates and losses are compared, because the report rounds batches and steps differently."""
    section = (ROOT / "docs" / "studies.md").read_text().split(title)[1].split("![")[0]
    rows = [line.strip("|").split("|")[1:-1] for line in section.splitlines() if re.match(r"\| \d", line)]
    documented = [float(cell) for row in rows for cell in row if re.fullmatch(r" [0-9.]+ ", cell)]
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", (ROOT / "docs" / "studies" / study / "index.html").read_text())
    known = [float(found[1]) for cell in cells if (found := re.fullmatch(r"(?:[≤≥~] )?([0-9.]+)", cell))]
    assert len(documented) > 12
    assert [number for number in documented if not any(abs(each - number) < 0.006 * number for each in known)] == []
