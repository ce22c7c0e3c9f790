"""Tests that every argument of Hugging Face's TrainingArguments is either honoured or refused, and that messages hold no secret."""

from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments

from undula.adapters.arguments import DECIDED_BY_THE_PLAN, FIXES, HONOURED, WITHOUT_EFFECT, refuse_unsupported
from undula.errors import SpecError


def test_every_argument_is_known_and_has_one_treatment() -> None:
    treatments = (DECIDED_BY_THE_PLAN, HONOURED, WITHOUT_EFFECT, frozenset(FIXES))
    known = frozenset().union(*treatments)
    assert sum(map(len, treatments)) == len(known)
    assert known == {field.name for field in fields(TrainingArguments)}


def test_a_token_of_the_hub_is_not_shown(tmp_path: Path) -> None:
    token = "hf_" + "A" * 34
    with pytest.raises(SpecError) as caught:
        refuse_unsupported(TrainingArguments(output_dir=str(tmp_path), hub_token=token), 1)
    assert str(caught.value).startswith("TrainingArguments.hub_token is (hidden), which a run does not support; push")
