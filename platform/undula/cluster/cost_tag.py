"""Tag with the cost of a run, which trackers show."""

from contextlib import suppress

from undula.cluster.prices import load_prices
from undula.errors import UndulaError
from undula.report.data.cost import cost_of
from undula.report.data.run_record import read_run
from undula.storage import Store


def cost_tag(store: Store) -> dict[str, str]:
    """Return the tag of a run's cost in US dollars, given the run directory; empty if one of its machines has no price."""
    with suppress(UndulaError):
        prices = load_prices(None)
        cost = cost_of(read_run(store), lambda events: prices)
        if cost and not cost.unpriced:
            return {"undula.cost_usd": f"{cost.total:.4f}"}
    return {}
