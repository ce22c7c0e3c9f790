"""Sentences that say why configurations of a plan are the cheapest, the fastest and the chosen one."""

from collections.abc import Iterator

from undula.driver.plan_table import Found, by_gpu, dollars_text, hours_text, rate_text
from undula.plan.candidates import Candidate, Target, cheapest, fastest
from undula.train.dry_run.counting import Setting


def name_of(candidate: Candidate[Setting]) -> str:
    """Return a configuration as text, such as `4 × L4, bf16, keep none, micro-batch 8`."""
    return f"{candidate.workers} × {candidate.offer.gpu.title}, {setting_text(candidate.setting)}"


def setting_text(setting: Setting) -> str:
    """Return a setting as text, such as `bf16, keep none, micro-batch 8`."""
    offload = ", offload" if setting.activations.offload else ""
    return f"{setting.compute}, keep {setting.activations.keep}{offload}, micro-batch {setting.samples}"


def price_text(candidate: Candidate[Setting]) -> str:
    """Return the lowest price of a run with its market."""
    prices = {"on demand": candidate.dollars, "on spot nodes": candidate.spot_dollars}
    known = {market: price for market, price in prices.items() if price is not None}
    if not known:
        return "at no known price"
    market = min(known, key=lambda name: known[name])
    return f"{dollars_text(known[market])} {market}"


def reasons(found: Found, target: Target | None, choice: Candidate[Setting] | None) -> Iterator[tuple[str, str]]:
    """Yield a mark of the table with the sentence about it."""
    fitting = [each for each in found if each.fits]
    cheap, fast = cheapest(found), fastest(found)
    if cheap is not None:
        yield (
            "C",
            f"The cheapest is {name_of(cheap)}: {price_text(cheap)} in {hours_text(cheap.hours)}.{_others(fitting, cheap)}",
        )
    if fast is not None:
        yield (
            "F",
            f"The fastest is {name_of(fast)}: {hours_text(fast.hours)} for {price_text(fast)}.{_gain(cheap, fast)}",
        )
    if choice is not None:
        yield (
            "*",
            f"The choice is {name_of(choice)}: {hours_text(choice.hours)} for {price_text(choice)}, {_why(fitting, target)}.",
        )


def _others(fitting: Found, cheap: Candidate[Setting]) -> str:
    """Return what the cheapest configurations of other GPUs and other numbers of workers cost."""
    groups = by_gpu([each for each in fitting if each.offer.gpu is not cheap.offer.gpu])
    best = [each for group in groups.values() if (each := cheapest(group)) is not None]
    text = ""
    if (next_best := cheapest(best)) is not None:
        text = f" The next kind of GPU is {next_best.offer.gpu.title}, for {price_text(next_best)}."
    more = [each for each in fitting if each.offer.gpu is cheap.offer.gpu and each.workers > cheap.workers]
    if (quick := fastest(more)) is not None:
        text += (
            f" {quick.workers} of the same are {_times(cheap.hours / quick.hours)} as fast, and the run costs {price_text(quick)}: each "
            f"then does {quick.efficiency:.0%} of the work of one alone."
        )
    return text


def _gain(cheap: Candidate[Setting] | None, fast: Candidate[Setting]) -> str:
    """Return what the fastest configuration gains over the cheapest, and which part of its steps is no computation."""
    step = fast.step
    text = (
        ""
        if fast.workers == 1
        else f" {(step.total - step.compute) / step.total:.0%} of a step is exchange between workers and update."
    )
    if cheap is None or cheap is fast:
        return text
    return f" That is {_times(cheap.hours / fast.hours)} as fast as the cheapest.{text}"


def _why(fitting: Found, target: Target | None) -> str:
    """Return why a configuration is chosen."""
    if target is None:
        return "which is the cheapest, because no target is given"
    meeting = sum(target.is_met(each) for each in fitting)
    among = f"among {meeting:,} of {len(fitting):,} configurations that fit"
    match target.kind:
        case "dollars":
            return f"the fastest {among} and cost at most {dollars_text(target.limit)}"
        case "hours":
            return f"the cheapest {among} and take at most {hours_text(target.limit)}"
        case _:
            kind = target.kind.removesuffix("/s")
            return f"the cheapest {among} and reach {rate_text(target.limit)} {kind} per second"


def _times(factor: float) -> str:
    return f"{factor:.1f} times" if factor < 10 else f"{factor:.0f} times"
