"""Tests of `undula plan` with the main job."""

import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml
from forked import run_script
from jobs_kit import LANGUAGE_MODEL

from undula.plan.host_memory import UPDATES
from undula.plan.rates import MeasuredRates
from undula.plan.scaling import Link
from undula.plan.work import DeviceRates

COMMANDS = Path(__file__).parents[2] / "platform" / "undula" / "cli" / "__main__.py"
JOB = LANGUAGE_MODEL.with_suffix(".yaml")


def plan(text: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    data = (f"data.train={text}/train", f"data.validation={text}/validation")
    command = ("plan", str(JOB), *data, *arguments)
    if cwd is not None:
        command = (sys.executable, "-m", "undula.cli", *command)
        return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=cwd)
    with TemporaryDirectory() as folder:
        return run_script(Path(folder), COMMANDS, command, {})


def plan_size(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Plan a small model by its size."""
    small = ("--parameters", "1e6", "--vocabulary", "256", "--context", "64", "--layers", "2")
    with TemporaryDirectory() as folder:
        return run_script(Path(folder), COMMANDS, ("plan", *small, "--workers", "1,2", *arguments), {})


def test_a_model_is_planned_by_its_size_alone() -> None:
    done = plan_size(
        "--gpu", "L4", "--gpu", "T4", "--optimizer", "sgd", "--steps", "9", "--global-batch", "32", "--json"
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["notes"][0].startswith(
        "A GPT with 951.6 k parameters: 2 layers, width 192, 3 heads, context 64, vocabulary 256, sgd"
    )
    assert found["state"]["parameters"] == (256 + 64) * 192 + 2 * (12 * 192**2 + 13 * 192) + 2 * 192
    assert {(each["gpu"], each["workers"]) for each in found["candidates"]} == {
        (g, w) for g in ("L4", "T4") for w in (1, 2)
    }
    assert all(each["fits"] for each in found["candidates"])
    state = found["state"]["snapshot_bytes"]
    assert state == pytest.approx(found["state"]["parameter_bytes"] + found["state"]["optimizer_bytes"], rel=0.01)
    assert [each["snapshots"] for each in found["host"]["hosts"]] == [2 * state, 2 * state]
    assert found["host"]["head"]["replicas"] == 3 * state
    fast = [each["compute"] for each in found["candidates"] if each["gpu"] == "T4" and each["samples"] > 1]
    assert set(fast) == {"fp16"}, "a T4 computes in bf16 no faster than in fp32"


@pytest.mark.nightly
def test_a_terminal_shows_what_is_counted(tmp_path: Path) -> None:
    terminal, screen = pty.openpty()
    small = ("--parameters", "1e6", "--vocabulary", "256", "--context", "64", "--layers", "2", "--gpu", "L4")
    command = [sys.executable, "-m", "undula.cli", "plan", *small, "--workers", "1"]
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=screen, env={**os.environ, "TERM": "xterm"})
    os.close(screen)
    shown = b""
    with suppress(OSError):  # at the end
        while part := os.read(terminal, 4096):
            shown += part
    assert process.wait() == 0
    assert b"running gpt_job.py up to its steps ..." in shown
    assert re.search(rb"counting bf16, \d of 8 settings \.\.\.", shown)
    assert "counting" not in (tmp_path / "out").read_text()


@pytest.mark.nightly
def test_a_sharded_model_is_planned_with_what_each_worker_holds() -> None:
    sharded, whole = (
        json.loads(plan_size("--gpu", "L4", "--global-batch", "32", "--json", *more).stdout)
        for more in (["sharding.stage=3"], [])
    )
    held = {each["workers"]: each["memory"] for each in sharded["candidates"]}
    assert sharded["state"]["parameters"] == whole["state"]["parameters"]
    assert held[2]["parameters"] == pytest.approx(whole["state"]["parameter_bytes"] / 2, rel=0.01)
    assert held[2]["optimizer"] == pytest.approx(whole["state"]["optimizer_bytes"] / 2, rel=0.01)
    assert held[2]["gathered"] > 0
    assert sharded["higher_stage"] is None
    snapshots = [each["snapshots"] for each in sharded["host"]["hosts"]]
    kept = 2 * sharded["state"]["snapshot_bytes"] + UPDATES * sharded["state"]["gradient_bytes"]
    assert snapshots == pytest.approx([kept] * 2, rel=0.01)


@pytest.mark.nightly
def test_tokens_per_second_are_shown_and_can_be_a_target_and_a_page_is_written(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    long = ("--global-batch", "32", "--steps", "1000000")
    done = plan_size(*long, "--gpu", "L4", "--target", "tokens/s=1e12", "--page", str(page))
    assert done.returncode == 0, done.stderr
    assert " tok/s " in done.stdout
    assert "a host with 1 of 2 workers holds about" in " ".join(done.stdout.split())
    assert "No configuration that fits meets --target tokens/s=1e12." in done.stdout
    assert f"page: {page}" in done.stdout
    assert "GPT of 951.6 k parameters" in page.read_text()
    assert "No configuration that fits meets the target." in page.read_text()


def test_the_main_job_fits_everywhere_and_more_workers_are_faster(text: str) -> None:
    done = plan(text, "--gpu", "L4", "--gpu", "H100", "--workers", "1,2", "--json", "config.model.layers=2")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["state"]["parameter_bytes"] == found["state"]["gradient_bytes"]
    assert found["state"]["optimizer_bytes"] > 1.99 * found["state"]["parameter_bytes"]
    assert {each["gpu"] for each in found["candidates"]} == {"L4", "H100 80 GB"}
    assert all(each["fits"] for each in found["candidates"])
    kept = {each["activations"]["keep"]: each["memory"]["activations"] for each in found["candidates"]}
    assert kept["all"] > kept["selective"] > kept["none"]
    assert {round(each["tokens_per_s"] / each["samples_per_s"], 6) for each in found["candidates"]} == {33.0}


@pytest.mark.nightly
def test_a_job_that_is_too_large_says_by_how_much_and_what_would_fit(text: str) -> None:
    large = ("config.model.layers=2", "config.model.width=8192", "config.model.heads=64", "plan.global_batch=512")
    done = plan(text, "--gpu", "L4", "--workers", "4", *large)
    assert done.returncode == 0, done.stderr
    assert "The job as it is needs" in done.stdout
    assert "on L4, " in done.stdout


@pytest.mark.nightly
def test_the_setting_of_the_yaml_is_shown_on_each_gpu(text: str) -> None:
    """Also fp16, where a GPU computes in bf16 as fast."""
    done = plan(
        text,
        "--gpu",
        "L4",
        "--gpu",
        "T4",
        "--workers",
        "1",
        "--json",
        "precision.compute=fp16",
        "config.model.layers=1",
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["candidates"]
    own = [each["gpu"] for each in found if (each["compute"], each["samples"]) == ("fp16", 8)]
    assert {"L4", "T4"} <= set(own)


@pytest.mark.nightly
def test_the_choice_is_written_to_a_copy_with_its_comments(text: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy.yaml"
    done = plan(
        text,
        "--gpu",
        "L4",
        "--workers",
        "2",
        "--target",
        "hours=100",
        "--apply",
        str(copy),
        "--json",
        "config.model.layers=2",
    )
    assert done.returncode == 0, done.stderr
    choice = json.loads(done.stdout)["choice"]
    written = yaml.safe_load(copy.read_text())
    assert written["workers"]["max"] == choice["workers"] == 2
    assert written["config"]["model"]["layers"] == 2, "an override of the command is part of the copy"
    assert "undula run" in done.stderr
    assert written.get("precision", {}).get("compute", "fp32") == choice["compute"]
    assert written["plan"].get("micro_batch", 8) == choice["samples"]
    comments = [line for line in JOB.read_text().splitlines() if line.startswith("#")]
    assert all(comment in copy.read_text() for comment in comments)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--gpu", "L5"), "--gpu L5 is not known; give one of V100, T4,"),
        (("--target", "years=3"), "years=3 is not one of hours=N, dollars=N, samples/s=N, tokens/s=N"),
        (("--workers", "8"), "--workers has no number up to plan.virtual_workers, which is 4"),
        (
            ("engine=horovod",),
            "engine=horovod is not part of what `undula plan` counts; override it, such as engine=torch",
        ),
        (("plan.batch=elastic",), "plan.batch=elastic is not part of what `undula plan` counts"),
        (("--workers", "0"), "0 is not a list of positive numbers, such as 1,2,4"),
        (("config.model.width=wide",), 'config.model.width is "wide": it should be a valid integer'),
    ],
)
def test_bad_input_is_one_sentence(text: str, arguments: tuple[str, ...], sentence: str) -> None:
    done = plan(text, *arguments)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "there is nothing to plan; give JOB.yaml, or --parameters N for a model by its size"),
        ((str(JOB), "--parameters", "1e6"), "and --parameters cannot be planned together; give one of them"),
        ((str(JOB), "--layers", "3"), "--layers describes a model by its size; give --parameters instead of"),
        (("--parameters", "1e6", "--apply", "x.yaml"), "--apply belongs to a job, and --parameters has none"),
        (
            ("--parameters", "1e9", "--optimizer", "adamax"),
            "--optimizer adamax is not one of sgd, adam, adamw, lars, lamb",
        ),
        (("--parameters", "1e9", "plan.foo=1"), "unknown key plan.foo"),
    ],
)
def test_a_job_or_a_size_is_given_and_not_both(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    done = run_script(tmp_path, COMMANDS, ("plan", *arguments), {})
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.nightly
def test_a_measured_worker_is_planned_like_a_gpu(text: str, tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    fp32 = {"fp32": DeviceRates(1e12, 1e11, 1e-6)}
    rates = MeasuredRates("own", 8 * 2**30, 1.0, fp32, fp32, 2, Link(1e-3, 1e8))
    file.write_text(rates.as_json())
    done = plan(text, "--rates", str(file), "--workers", "1,2", "--json", "config.model.layers=1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["candidates"]
    assert {(each["gpu"], each["compute"]) for each in found} == {("own", "fp32")}
    assert found[0]["room_bytes"] == 8 * 2**30
    assert all(each["step"]["communication"] > 1e-3 for each in found if each["workers"] == 2)


def test_a_file_without_rates_is_refused_in_one_sentence(text: str, tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    file.write_text("{}")
    done = plan(text, "--rates", str(file))
    assert done.returncode == 2
    assert done.stderr.startswith(f"undula: {file} has no measured rates (")
    assert done.stderr.endswith(f"write it with `undula doctor --measure {file}`\n")
