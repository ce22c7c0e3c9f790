"""Tests of the page of a plan."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from browser_kit import assert_policy_allows_only, needs_chromium, opened_in
from playwright.sync_api import Browser

from undula.config.job import JobSpec
from undula.driver.count_job import JobCount
from undula.driver.plan_host import host_sentences, host_tree, load_of
from undula.driver.plan_job import Planned
from undula.driver.plan_page import Conditions, render_plan
from undula.driver.plan_reasons import reasons
from undula.driver.plan_table import NONE_FITS, hours_text
from undula.parallel.spec import ActivationsSpec
from undula.plan.candidates import Kind, Offer, Target, Workload, candidates, chosen
from undula.plan.gpus import GPUS
from undula.plan.host_memory import parts_of_host
from undula.plan.memory import PassCount, StateCount
from undula.plan.plan import PlanSpec
from undula.plan.scaling import Link
from undula.plan.work import Work
from undula.state.spec import CheckpointSpec
from undula.train.dry_run.counting import Setting

GIB = 2**30
STATE = StateCount(GIB // 4, GIB // 4, GIB, 0, 0, GIB, GIB // 8, 2 * GIB, 0, 4 * GIB, 3 * GIB)
PASSES = PassCount(
    samples=4,
    batch_bytes=GIB // 4,
    saved_bytes=20 * GIB,
    forward_bytes=21 * GIB,
    first_bytes=21 * GIB,
    later_bytes=21 * GIB,
    work=Work(flops=10**13, moved_bytes=10**9, operations=100),
)
SMALL = replace(
    PASSES, saved_bytes=2 * GIB, forward_bytes=3 * GIB, first_bytes=3 * GIB, later_bytes=3 * GIB, work=PASSES.work * 1.3
)
OWN, SPARING = (Setting("bf16", ActivationsSpec(keep=keep), 4) for keep in ("all", "none"))
SPEC = PlanSpec(global_batch=16, virtual_workers=4)
WORKLOAD = Workload(STATE, [Kind(OWN, "bf16", PASSES), Kind(SPARING, "bf16", SMALL)], SPEC, 100_000, tokens=512)
OFFERS = [Offer(GPUS["L4"], "g6.xlarge", 1.0, 0.5), Offer(GPUS["H100"], "p5.4xlarge", 7.0, None)]
FOUND = tuple(candidates(WORKLOAD, OFFERS, (1, 2, 4), Link(1e-4, 1.25e9), 0.05))
PLANNED = Planned(OWN, JobCount(JobSpec(name="job", plan=SPEC), STATE, {OWN: PASSES}, True, 100_000, 512), FOUND)
CONDITIONS = Conditions(0.1, 10.0, 0.05)


def page_with(target: Target | None = None) -> str:
    return render_plan(PLANNED, "job", (), target, CONDITIONS)


def test_the_page_says_what_the_job_is_and_what_is_assumed() -> None:
    html = page_with()
    assert "268.4 M parameters, 16 samples per step on 4 virtual workers, 100,000 steps" in html
    assert "10 Gbit/s and 0.1 ms between two workers; a spot worker is taken 0.05 times an hour" in html
    assert_policy_allows_only(html, "style")


def test_a_tile_stands_for_all_that_its_configuration_is() -> None:
    def tiles(html: str) -> list[tuple[str, ...]]:
        return re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", html)[1:]

    cheap, fast = FOUND[0:1], FOUND[-1:]
    assert [label for label, _ in tiles(page_with())] == ["cheapest, choice", "fastest"]
    price, time = (value for _, value in tiles(page_with()))
    assert (price[0], time) == ("$", "2.1 h")
    assert [*tiles(page_with(Target("hours", 1.0)))[-1]] == ["choice", "–"]
    unpriced = replace(PLANNED, candidates=(replace(fast[0], offer=Offer(GPUS["H100"], "own", None, None)),))
    found = tiles(render_plan(unpriced, "job", (), None, CONDITIONS))
    assert found == [("cheapest", "–"), ("fastest, choice", hours_text(fast[0].hours))]
    assert not cheap[0].fits


def test_bars_add_up_to_what_is_needed_and_the_line_is_the_memory_of_the_gpu() -> None:
    first = page_with().split("<h3>L4</h3>")[1]
    bar = first.split("<svg")[1].split("</svg>")[0]
    own = min(
        (each for each in FOUND if each.setting == OWN and each.offer.gpu is GPUS["L4"]), key=lambda each: each.hours
    )
    assert not own.fits
    sizes = [float(size) for size in re.findall(r'width="([\d.]+)%"', bar)]
    assert sum(sizes) == pytest.approx(100, abs=0.01), "it needs more than there is, so it is the longest"
    assert sizes[0] == pytest.approx(100 * GIB / own.needed_bytes, abs=0.001)
    limit = re.search(r'class="limit" x1="([\d.]+)%"', bar)
    assert limit
    assert float(limit[1]) == pytest.approx(100 * own.room_bytes / own.needed_bytes, abs=0.001)
    assert "does not fit" in first.split("<svg")[0]
    assert "nearest that fits" in first.split("<h3>")[0]


def test_hosts_are_named_that_lack_memory() -> None:
    single, four = (next(each for each in FOUND if each.workers == workers) for workers in (1, 4))
    alone, *problems = host_sentences(PLANNED, single)
    copies = "two snapshots 6.0 GiB, a checkpoint that is being written 3.0 GiB, a copy on its way to the head 3.0 GiB"
    assert copies in alone
    assert alone.endswith("of which 9.0 GiB are copies of the state.")
    among, *_ = host_sentences(PLANNED, four)  # g6.xlarge has one GPU, so each worker has a host of its own
    assert "two snapshots 6.0 GiB, a checkpoint that is being written 0.8 GiB, data" in among
    assert among.endswith("of which 6.0 GiB are copies of the state.")
    for text, who, workers in ((alone, "the host of the worker", 1), (among, "a host with 1 of 4 workers", 4)):
        parts = parts_of_host(load_of(PLANNED), 1, workers)
        now, most = (parts.total - parts.change) / GIB, parts.total / GIB
        assert f"{who} holds about {now:.1f} GiB ({most:.1f} GiB while workers change)" in text
    assert [*host_sentences(PLANNED, None)][1:] == problems
    others = tuple(each for each in FOUND if each.setting != OWN)
    assert [*host_sentences(replace(PLANNED, candidates=others), None)]
    assert not [*host_sentences(replace(PLANNED, candidates=()), None)]
    assert len(problems) == 1
    assert problems[0].startswith(
        "g6.xlarge has 16 GiB, too little for two snapshots of 3.0 GiB, so the run takes none there"
    )
    larger = replace(PLANNED, counted=replace(PLANNED.counted, state=replace(STATE, snapshot_bytes=6 * GIB)))
    (problem,) = list(host_sentences(larger, single))[1:]
    assert problem.startswith("g6.xlarge has 16 GiB, but a worker takes up to ")
    assert all(text in page_with() for text in host_sentences(PLANNED, PLANNED.choice(None)))


def test_hosts_are_the_same_in_sentences_and_in_json() -> None:
    tree = host_tree(PLANNED)
    assert [each["workers"] for each in tree["hosts"]] == [1, 2, 4]
    assert {each["snapshots"] for each in tree["hosts"]} == {6 * GIB}
    assert tree["head"]["replicas"] == 9 * GIB
    quiet = replace(PLANNED.counted.spec, checkpoint=CheckpointSpec(snapshot_every_steps=0))
    planned = replace(PLANNED, counted=replace(PLANNED.counted, spec=quiet))
    assert {each["snapshots"] for each in host_tree(planned)["hosts"]} == {0}
    assert "snapshots" not in "".join(host_sentences(planned, None))
    offloading = replace(OWN, activations=replace(OWN.activations, offload=True))
    passes = {offloading: PASSES}
    planned = replace(PLANNED, own=offloading, counted=replace(PLANNED.counted, passes=passes))
    assert [each["activations"] for each in host_tree(planned)["hosts"]] == [20 * GIB, 40 * GIB, 80 * GIB]


def test_reasons_have_the_figures_of_the_table() -> None:
    said = dict(reasons(FOUND, None, chosen(FOUND, None)))
    one = next(each for each in FOUND if each.setting == SPARING and each.workers == 1 and each.offer.gpu is GPUS["L4"])
    assert one.spot_dollars is not None
    assert said["C"].startswith(
        f"The cheapest is 1 × L4, bf16, keep none, micro-batch 4: ${one.spot_dollars:.2f} on spot nodes in "
    )
    assert "The next kind of GPU is H100 80 GB, for $" in said["C"]
    assert "each then does" in said["C"]
    fast = "The fastest is 1 × H100 80 GB, bf16, keep all, micro-batch 4: 2.1 h for $14.96 on demand."
    assert said["F"] == f"{fast} That is 11 times as fast as the cheapest."
    assert said["*"].endswith("which is the cheapest, because no target is given.")
    target = Target("tokens/s", 1000.0)
    meeting = sum(each.fits and target.is_met(each) for each in FOUND)
    said = dict(reasons(FOUND, target, chosen(FOUND, target)))
    assert said["*"].endswith(
        f"the cheapest among {meeting} of 9 configurations that fit and reach 1,000 tokens per second."
    )


def test_a_plan_in_which_nothing_fits_has_a_page() -> None:
    nothing = tuple(each for each in FOUND if not each.fits)
    html = render_plan(replace(PLANNED, candidates=nothing), "job", (), Target("hours", 1.0), CONDITIONS)
    assert NONE_FITS in html
    assert "No configuration that fits meets the target." in html
    assert "Over the number of workers" not in html


@needs_chromium
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_the_page_fits_its_window_and_draws_a_line_for_each_gpu(
    browser: Browser, tmp_path: Path, width: int, scheme: str
) -> None:
    file = tmp_path / "plan.html"
    file.write_text(page_with(Target("dollars", 200.0)))
    with opened_in(browser, file, width, scheme) as opened:
        opened.assert_fits_and_is_quiet()
        assert opened.page.locator("#speed .plot .curve").count() == 2
        assert opened.page.locator("#cost .plot .glyph").count() == 6
        assert "logarithmic" in opened.page.locator("#speed").inner_text()
        table = opened.page.locator(".card.scroll").first
        assert table.evaluate("each => each.scrollHeight <= each.clientHeight"), "all rows are visible"
        box = opened.page.locator(".stack svg").first.bounding_box()
        assert box
        assert box["width"] > 250
