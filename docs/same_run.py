"""Draws docs/same_run.svg: the losses of two runs of one plan, and the number of workers of the second.

python docs/same_run.py ~/undula/runs/fixed ~/undula/runs/spot-chaos docs/same_run.svg
"""

import re
import sys

import matplotlib
import numpy as np

from undula.state.events import FaultEvent
from undula.state.ledger import Ledger, decode_events, read_ledger
from undula.storage import open_store

FIXED, SPOT, MARK = "#9ecae1", "#08306b", "#cb181d"


def draw(fixed: Ledger, spot: Ledger, out: str) -> None:
    """Draw the figure, with both losses above and the number of workers below."""
    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {"svg.hashsalt": "undula", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    )
    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(7.2, 3.6), height_ratios=(3, 2), layout="constrained"
    )
    losses = [np.array(run.steps["loss"].to_pylist()) for run in (fixed, spot)]
    same = (
        "equal to the last bit" if np.array_equal(*losses) else f"at most {abs(losses[0] - losses[1]).max():.1e} apart"
    )
    steps = np.arange(1, len(losses[0]) + 1)
    above.plot(steps, losses[0], color=FIXED, linewidth=5, solid_capstyle="round", label="fixed cluster of 1 worker")
    above.plot(steps, losses[1], color=SPOT, linewidth=1.2, label="cluster that comes and goes")
    above.set_ylabel("loss")
    above.legend(frameon=False, title=f"{len(steps)} losses, {same}", alignment="left")
    below.step(steps, spot.steps["world_size"].to_pylist(), where="mid", color=SPOT, linewidth=1.2)
    below.set(xlabel="step", ylabel="workers", yticks=(0, 1, 2), ylim=(0, 6.5))
    for event in decode_events(spot.events):
        if isinstance(event, FaultEvent) and event.step is not None:
            below.axvline(event.step, color=MARK, linewidth=0.6, linestyle=":")
            text = re.sub(r"^at .*?: | \(\w+\)$", "", event.fault)
            below.annotate(text, (event.step, 2.4), (1, 0), textcoords="offset points", color=MARK, rotation=90, size=6)
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    draw(*(read_ledger(open_store(run)) for run in sys.argv[1:3]), sys.argv[3])
