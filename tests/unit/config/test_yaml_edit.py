"""Tests that values of a YAML file change, and nothing else does."""

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from undula.config.yaml_edit import with_values

TEXT = """\
# A job.
name: run   # its name
plan:
  global_batch: 32
  # how many at once
  micro_batch:   # none
workers: {min: 1, max: 2}  # in braces
activations: {}
data:
  train: "a # b"
"""


def changed(tree: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    return {**(tree or {}), path[0]: changed((tree or {}).get(path[0]), path[1:], value)}


@pytest.mark.parametrize(
    "key",
    [
        *("name", "plan.global_batch", "plan.micro_batch", "plan.virtual_workers", "workers.max", "workers.gpus"),
        *("activations.keep", "precision.compute", "data.train", "data.validation", "a.b.c"),
    ],
)
@pytest.mark.parametrize("value", [7, "sqrt", None, 1.5, True])
@pytest.mark.parametrize("ending", ["", "\n"])
def test_a_value_changes_and_comments_stay(key: str, value: Any, ending: str) -> None:
    text = TEXT.rstrip("\n") + ending
    new = with_values(text, {key: value})
    assert yaml.safe_load(new) == changed(yaml.safe_load(text), key.split("."), value)
    for comment in ("# A job.", "# its name", "# how many at once", "# none", "# in braces"):
        assert comment in new
    old_lines = [line for line in text.splitlines() if line.split(":")[0].strip() != key.rpartition(".")[2]]
    if "." not in key or key.partition(".")[0] == "plan":
        assert [line for line in old_lines if line not in new.splitlines()] == []


@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "c"]),
        st.one_of(
            st.integers(), st.text("xyz #:", max_size=5), st.dictionaries(st.sampled_from(["d", "e"]), st.integers())
        ),
    ),
    st.sampled_from(["a", "b", "a.d", "c.e", "f", "f.g"]),
    st.one_of(st.integers(), st.text("xyz #:", max_size=5)),
    st.sampled_from([True, False, None]),
)
def test_the_result_is_the_tree_with_the_value(tree: dict[str, Any], key: str, value: Any, style: bool | None) -> None:
    path = key.split(".")
    if len(path) > 1 and not isinstance(tree.get(path[0], {}), dict):
        return
    text = yaml.safe_dump(tree, default_flow_style=style)
    assert yaml.safe_load(with_values(text, {key: value})) == changed(tree, path, value)
