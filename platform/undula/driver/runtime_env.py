"""Ray's runtime environment of a job, which the user gives by `--runtime-env`: packages to install, variables, files that are not sent."""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray.runtime_env import RuntimeEnv

from undula.config.yaml_file import read_yaml
from undula.elastic.ray.environment import KEEP_HEAP, NO_GPU, SURVIVE_NCCL
from undula.elastic.ray.private_environment import variables_for
from undula.errors import SpecError, one_line
from undula.masking.shapes import secrets_in

OWN = {
    "working_dir": "it is the folder of the script",
    "worker_process_setup_hook": "its hook gives secrets to the processes of the job",
}
"""Keys that Undula sets, each with its value."""
OWN_VARIABLES = ("UNDULA_", "PYTHONHASHSEED", *variables_for(""), *KEEP_HEAP, *NO_GPU, *SURVIVE_NCCL)
"""Beginnings of the names of variables that Undula sets."""


def load_runtime_env(file: Path) -> dict[str, Any]:
    """Return the runtime environment in a YAML file, as `ray job submit --runtime-env` reads it.

    Raises:
        SpecError: Ray does not accept it, it sets what Undula sets, or it has a secret that Ray's list of jobs would show.
    """
    tree, origins = read_yaml(file, "a runtime environment of Ray", "pip, env_vars")
    known = RuntimeEnv.known_fields
    for key in tree:
        if key in OWN:
            raise SpecError(f"{origins[key]}: Undula sets {key} itself, and {OWN[key]}; remove {key}")
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            fix = f"did you mean {close[0]}?" if close else "it has pip, uv, conda, env_vars, excludes, py_modules, ..."
            raise SpecError(f"{origins[key]}: a runtime environment of Ray has no key {key}: {fix}")
    tree = {key: value for key, value in tree.items() if value is not None}
    _refuse_secrets(tree, origins)
    variables = tree.get("env_vars")
    for name, value in variables.items() if isinstance(variables, dict) else ():
        origin = origins.get(f"env_vars.{name}", str(file))
        if str(name).startswith(OWN_VARIABLES):
            raise SpecError(f"{origin}: Undula sets {name} itself; remove it from env_vars")
        if not isinstance(value, str):  # Ray's own message would show the value
            raise SpecError(f"{origin}: env_vars.{name} is not a text; quote its value")
    try:
        parsed = RuntimeEnv(**tree)
    except (TypeError, ValueError) as error:
        raise SpecError(f"{file}: Ray does not accept this runtime environment: {one_line(error)}") from None
    # Ray has read the files of packages that `tree` only names.
    _refuse_secrets({key: value for key, value in parsed.items() if key in tree}, origins)
    return tree


def _refuse_secrets(tree: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    for key, value in tree.items():
        if key != "env_vars" and any(secrets_in(json.dumps(value, default=str))):
            raise SpecError(
                f"{origins[key]}: {key} has a secret in it, which Ray's list of jobs would show; remove it, and pass it on with --secret"
            )
