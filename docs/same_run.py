"""Draws docs/same-run.svg, the figure of the README, from the ledgers of two runs. It refuses runs whose losses are not equal.

These commands, in the root of the repository, made the runs and the figure:

undula data stdlib-text --out ~/undula/data/stdlib-text
undula run jobs/language_model.yaml name=fixed deterministic=true plan.max_steps=200 workers.min=2
undula chaos jobs/language_model.yaml --faults docs/same_run_faults.txt --nodes 2 name=spot deterministic=true \
    plan.max_steps=200 workers.max=4 workers.grow=always
undula verify spot-chaos --against fixed
python docs/same_run.py fixed spot-chaos > docs/same-run.svg
"""

import re
import sys
from collections.abc import Sequence
from itertools import pairwise

from undula.state.events import FaultEvent
from undula.state.ledger import Ledger, events_of, read_ledger
from undula.state.locate import locate_run

WIDTH, LEFT, RIGHT = 760, 56, 744
LOSS_TOP, LOSS_BOTTOM = 34, 214
WORKERS_TOP, WORKERS_BOTTOM = 290, 362
HALO = 'paint-order="stroke" stroke="#fff" stroke-width="4"'
"""Attributes that keep text readable above lines."""
FIXED, SPOT, TEXT, GRID = "#c3c9d2", "#0b62c4", "#3d434c", "#e6e8ec"
LOSSES = {
    r"drain node \d+ deadline (\d+)": r"notice of \1 s",
    r"kill node \d+": "node killed",
    r"sigkill worker \d+": "worker killed",
}
"""What the figure calls each form of a fault that takes a worker."""


def figure(fixed: Ledger, spot: Ledger) -> str:
    """The figure as SVG: the losses of both runs, and below them the number of workers of the second one."""
    losses, sizes = spot.steps["loss"].to_pylist(), spot.steps["world_size"].to_pylist()
    if losses != fixed.steps["loss"].to_pylist():
        raise SystemExit("the losses of the two runs are not equal, so there is no figure")
    steps, most = len(losses), max(sizes)
    low, high = min(losses), max(losses)

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / steps

    def loss_y(loss: float) -> float:
        return LOSS_BOTTOM - (LOSS_BOTTOM - LOSS_TOP) * (loss - low) / (high - low)

    def workers_y(workers: float) -> float:
        return WORKERS_BOTTOM - (WORKERS_BOTTOM - WORKERS_TOP) * workers / most

    curve = [(x(step + 0.5), loss_y(loss)) for step, loss in enumerate(losses)]
    stairs = [(x(step + side), workers_y(size)) for step, size in enumerate(sizes) for side in (0, 1)]
    parts = [
        *(grid(loss_y(tick), f"{tick}") for tick in range(1, 10) if low <= tick <= high),
        *(grid(workers_y(tick), f"{tick}") for tick in range(most + 1)),
        *(text(x(tick), WORKERS_BOTTOM + 16, f"{tick}", "middle") for tick in range(0, steps + 1, 50)),
        line(curve, FIXED, 7),
        line(curve, SPOT, 1.6),
        line(stairs, SPOT, 1.6),
        text(LEFT, 20, "Training loss per step", weight=600),
        legend(386, FIXED, 7, "fixed: 2 workers"),
        legend(528, SPOT, 1.6, f"changing: {min(sizes)} to {most} workers"),
        text(LEFT, WORKERS_TOP - 44, "Number of workers of the changing cluster", weight=600),
        text((LEFT + RIGHT) / 2, WORKERS_BOTTOM + 34, "step", "middle"),
    ]
    for number, (step, name) in enumerate(changes(spot)):
        at, label_y = x(step), WORKERS_TOP - (26 if number % 2 else 12)
        parts += [line([(at, label_y + 3), (at, WORKERS_BOTTOM)], TEXT, 0.6, dashes="2 3")]
        parts += [text(at, label_y, name, "middle", size=11)]
    body = "\n".join(parts)
    height = WORKERS_BOTTOM + 46
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif" fill="{TEXT}">
<title>Two runs of one plan have equal losses at every step, although the number of workers of one changes</title>
<rect width="{WIDTH}" height="{height}" rx="6" fill="#fff"/>
{body}
</svg>"""


def changes(spot: Ledger) -> list[tuple[int, str]]:
    """The first step of each group of another size, and what changed it: a worker that joined, or the newest fault that took one."""
    sizes = spot.steps["world_size"].to_pylist()
    faults = [(event.step or 0, loss_of(event.fault)) for event in events_of(spot.events, FaultEvent)]
    found = []
    for step, (before, after) in enumerate(pairwise(sizes), 1):
        if after > before:
            found.append((step, "worker joins"))
        elif after < before:
            found.append((step, [name for at, name in faults if name and at <= step][-1]))
    return found


def loss_of(fault: str) -> str | None:
    """What the figure calls a fault, such as `at step 40: kill node 0 (5053ba16)`; None if it takes no worker."""
    action = fault.partition(": ")[2].partition(" (")[0]
    return next(
        (re.sub(pattern, name, action) for pattern, name in LOSSES.items() if re.fullmatch(pattern, action)), None
    )


def grid(y: float, number: str) -> str:
    return line([(LEFT, y), (RIGHT, y)], GRID, 1) + text(LEFT - 8, y + 4, number, "end")


def legend(x: float, color: str, width: float, name: str) -> str:
    return line([(x, 16), (x + 24, 16)], color, width) + text(x + 30, 20, name)


def line(points: Sequence[tuple[float, float]], color: str, width: float, dashes: str = "none") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}" stroke-dasharray="{dashes}" '
        'stroke-linejoin="round"/>'
    )


def text(x: float, y: float, content: str, anchor: str = "start", size: int = 13, weight: int = 400) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" {HALO}>{content}</text>'


if __name__ == "__main__":
    print(figure(*(read_ledger(locate_run(run)) for run in sys.argv[1:3])))
