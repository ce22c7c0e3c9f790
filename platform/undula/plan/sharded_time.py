"""Duration of a step of a sharded model, from counted operations and bytes, rates of a device, and links between workers. Pure."""

from undula.plan.memory import Division, PassCount, StateCount
from undula.plan.scaling import Link
from undula.plan.step_memory import SentBytes, sent_bytes
from undula.plan.work import DeviceRates


def exchange_s(
    state: StateCount, passes: PassCount, division: Division, rates: DeviceRates, link: Link, backward_share: float
) -> float:
    """Return the seconds of a step for which a worker waits for parameters and gradients.

    On a GPU, a unit is gathered while the one before computes, and in stages 2 and 3 its gradients travel while the next one computes.
    Only the first unit has nothing to hide behind. Workers on CPUs gather and compute one after the other.

    Args:
        state: What was counted of the states.
        passes: What was counted of a micro-batch.
        division: Division of the step among the ranks.
        rates: Rates of the device.
        link: Link between two workers.
        backward_share: Share of the backward pass in both passes.
    """
    if division.world_size == 1:
        return 0.0
    sent = max(
        (sent_bytes(state, passes, division, rank) for rank in range(division.world_size)), key=lambda each: each.total
    )
    gathers, gradients = _seconds(sent, link)
    if not rates.is_async:
        return gathers + gradients
    units = sum(1 for unit in state.units if unit.tensors)
    each = rates.seconds(passes.work) * (1 - 1 / max(units, 1))
    rounds = -(-division.virtual_workers // division.world_size) * division.micro_batches
    forward, backward = each * (1 - backward_share), each * backward_share * rounds
    if division.stage == 3:  # units are gathered in both passes
        return max(gathers / 2 - forward * rounds, 0.0) + max(gathers / 2 + gradients - backward, 0.0)
    # Stage 1 sends its gradients after the last backward pass.
    hidden = backward if division.stage == 2 else 0.0
    return max(gathers - forward, 0.0) + max(gradients - hidden, 0.0)


def _seconds(sent: SentBytes, link: Link) -> tuple[float, float]:
    """Return the seconds in which parameters and gradients are sent."""
    gathers = sent.gathers * link.latency_s + sent.parameters / link.bytes_per_s
    return gathers, sent.exchanges * link.latency_s + sent.gradients / link.bytes_per_s


def copied_bytes(state: StateCount, passes: PassCount, division: Division) -> float:
    """Return what a rank reads and writes to copy gathered parameters, and to concatenate, add up, norm and clip gradients."""
    ranks, stage = division.world_size, division.stage
    rounds = -(-division.virtual_workers // ranks)
    gradient = sum(unit.gradient_shard_bytes(ranks) for unit in state.units)
    whole, parameters = gradient * ranks, sum(unit.shard_bytes(ranks) for unit in state.units) * ranks
    gathered = 2 * parameters * passes.gathered_share * (2 * rounds * division.micro_batches if stage == 3 else 1)
    flat = 2 * whole * rounds * division.micro_batches + 3 * whole * rounds * (division.micro_batches - 1)
    # In stages 2 and 3, the slices of all ranks are stacked, copied and added up after each turn.
    summed = 7 * whole * rounds if stage >= 2 and ranks > 1 else 3 * whole * (rounds - 1)
    return gathered + flat + summed + 3 * gradient
