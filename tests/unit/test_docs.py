"""Tests that the docs agree with the code."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from numbers_job import cpu_run, network, numbers_job
from ranks import on_ranks

from undula.cli.reference import markdown
from undula.config.deepspeed import as_yaml, convert
from undula.config.job import load_spec
from undula.parallel.spec import ShardingSpec
from undula.state.events import ValidationEvent
from undula.state.ledger import events_of, read_ledger
from undula.storage import Store
from undula.train.job import Job

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


def _train_documented(rank: int, world_size: int, code: str, job: Job) -> Any:
    scope: dict[str, Any] = {
        "Net": network,
        "loss_of": lambda model, batch: model(batch["x"][:, None] / 48).square().mean(),
    }
    exec(code, scope)
    scope["train"](cpu_run(job, rank, world_size))
    return [event.loss for event in events_of(read_ledger(Store(job.run_url)).events, ValidationEvent)]


def test_the_documented_average_of_the_weights_has_the_same_numbers_in_all_stages(tmp_path: Path) -> None:
    section = (ROOT / "docs" / "api.md").read_text().split("## An average of the weights")[1]
    code = section.split("```python\n")[1].split("```")[0]
    job = numbers_job(tmp_path, epochs=2)
    job = replace(job, data=replace(job.data, validation=job.data.train))
    found = []
    for ranks, stage in ((1, 0), (2, 0), (2, 1), (2, 2), (2, 3)):
        own = replace(job, run_url=f"{tmp_path}/{ranks}-{stage}", sharding=ShardingSpec(stage=stage))
        found.append(on_ranks(ranks, _train_documented, code, own)[0])
    assert len(set(found[0])) > 1
    assert all(each == found[0] for each in found)


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
