"""The core of the library and the satellites around it, and what each takes from the others.

The core is what decides the bits of a run, proves them, or is needed by two satellites. A satellite can be left out, such as planning or
studies. tests/contract.txt lists the names that satellites take from the core.
"""

import ast
import tokenize
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "platform" / "undula"
SATELLITES = {
    "adapters": ("adapters", "train.whole_weights"),
    "convert": ("cli.convert", "config.deepspeed"),
    "horovod": (
        *("cli.build_horovod", "cluster.build_horovod", "elastic.ray.horovod", "elastic.ray.horovod_trainer"),
        *("elastic.rendezvous", "parallel.reduce.horovod"),
    ),
    "lab": (
        *("cli.bench", "cli.chaos", "plan.scaling", "report.data.sameness", "report.data.scaling", "train.plain_loop"),
        *("report.render.scaling_page", "report.render.scaling_text", "testing"),
    ),
    "operations": (
        *("cli.cluster", "cli.doctor", "cli.spot", "cluster.check", "cluster.doctor", "cluster.examine"),
        *("cluster.facts", "cluster.job_fit", "cluster.node_types", "cluster.notices", "cluster.probe"),
        *("cluster.watcher", "cluster.worker_check", "testing.market"),
    ),
    "optimizers": ("optim",),
    "pages": (
        *("cli.compare", "cli.ls", "cli.report", "cli.show", "report.data.comparison", "report.data.curves"),
        *("report.data.selection", "report.render"),
    ),
    "planning": (
        *(
            "cli.plan",
            "cli.plan_options",
            "cli.prices",
            "cluster.cost_tag",
            "cluster.price_file",
            "cluster.prices",
            "config.yaml_edit",
            "driver.count_job",
        ),
        *("driver.count_process", "driver.estimate", "driver.gpt_job", "driver.measure", "driver.plan_host"),
        *("driver.plan_job", "driver.plan_model", "driver.plan_page", "driver.plan_reasons", "driver.plan_table"),
        *("driver.smoke", "driver.smoke_figures", "elastic.ray.gpu_memory", "plan.candidates", "plan.gpt", "plan.gpus"),
        *("plan.host_memory", "plan.memory", "plan.prices", "plan.rates", "plan.sharded_sums", "plan.sharded_time"),
        *("plan.step_memory", "plan.step_time", "plan.work", "report.data.cost"),
        *("report.render.cost_text", "train.dry_run"),
    ),
    "preparation": ("cli.data", "data.prepare"),
    "studies": ("cli.study", "study"),
    "trackers": ("telemetry.trackers",),
}
"""Modules and packages of each satellite. Of a module and the package that it lies in, the module counts."""
IN_CORE = ("train.dry_run.rehearsal",)
"""Modules of the core in a package of a satellite."""

BUDGETS = {
    "adapters": 3220,
    "convert": 710,
    "core": 26240,
    "horovod": 405,
    "lab": 2750,
    "operations": 1655,
    "optimizers": 230,
    "pages": 1560,
    "planning": 3960,
    "preparation": 1155,
    "studies": 3760,
    "trackers": 320,
}
"""Maximum lines of code of each, without docstrings. To raise one is a commit of its own that says why."""


def ring_of(module: str) -> str:
    """Return the satellite of a module, such as `undula.study.sweep`, or `core`."""
    parts = module.split(".")[1:]
    of_part = {part: name for name, owned in SATELLITES.items() for part in owned} | dict.fromkeys(IN_CORE, "core")
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in of_part:
            return of_part[".".join(parts[:length])]
    return "core"


def taken_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of everything that a file imports from the library by `from ... import`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "undula":
            yield from ((node.module, alias.name) for alias in node.names)


def code_lines(source: str) -> int:
    """Return the number of lines with code: all but blank lines, comments and docstrings."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
    lines: set[int] = set()
    for token in tokenize.tokenize(BytesIO(source.encode()).readline):
        if token.type not in (*skipped, tokenize.ENDMARKER):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)
