"""Test that every argument of Hugging Face's TrainingArguments is either honoured or refused."""

from dataclasses import fields

from transformers import TrainingArguments

from undula.adapters.arguments import DECIDED_BY_THE_PLAN, FIXES, HONOURED, WITHOUT_EFFECT


def test_every_argument_is_known_and_has_one_treatment() -> None:
    treatments = (DECIDED_BY_THE_PLAN, HONOURED, WITHOUT_EFFECT, frozenset(FIXES))
    known = frozenset().union(*treatments)
    assert sum(map(len, treatments)) == len(known)
    assert known == {field.name for field in fields(TrainingArguments)}
