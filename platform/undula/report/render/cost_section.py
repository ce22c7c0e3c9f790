"""The report page's section of what a run has cost."""

from html import escape

from undula.report.data.cost import DOING, Cost, cost_rows, dollars


def cost_section(cost: Cost) -> str:
    """A bar of the dollars by class, and what there is to say of them, as HTML."""
    bars, keys, x = "", "", 0.0
    for name, amount in cost.dollars.items() if cost.total else ():
        share = max(amount / cost.total, 0.0)  # of clocks that differ, a class may have a little less than nothing
        bars += f'<rect class="g-{name}" x="{x:.3%}" width="{share:.3%}" height="100%"/>'
        swatch = f'<svg viewBox="0 0 18 12" aria-hidden="true"><rect class="g-{name}" x="3" width="12" height="12" rx="2"/></svg>'
        keys += f"<li>{swatch}{DOING[name]} <b>{dollars(amount)}</b> {share:.1%}</li>"
        x += share
    bar = f'<svg class="share" role="img" aria-label="dollars by class">{bars}</svg><ul class="keys">{keys}</ul>'
    facts = "".join(f"<dt>{label}</dt><dd>{escape(value)}</dd>" for label, value in cost_rows(cost))
    return f'<h2>Cost</h2><div class="card cost">{bar if bars else ""}<dl class="facts">{facts}</dl></div>'
