"""The docs say what the code does."""

import re
from pathlib import Path

from undula.reference import markdown
from undula.spec import load_spec

ROOT = Path(__file__).parents[2]


def test_the_configuration_reference_is_the_one_that_the_code_gives() -> None:
    """Mend with: undula schema --markdown > docs/configuration.md"""
    assert (ROOT / "docs" / "configuration.md").read_text() == markdown()


def test_every_job_that_ships_is_valid() -> None:
    jobs = sorted(path for path in (ROOT / "jobs").glob("*.yaml") if path.with_suffix(".py").exists())
    assert [load_spec(path).spec.name for path in jobs] == ["image-classifier", "language-model"]


def test_job_scripts_read_like_examples() -> None:
    for path in (ROOT / "jobs").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 80


def test_links_between_the_docs_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
