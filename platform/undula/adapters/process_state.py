"""State of the process that Accelerate keeps for all of its users: its Accelerator, its loggers and Hugging Face's Trainer."""

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from undula.adapters.script import Place


def shared_state(here: Place, is_on_cpu: bool) -> PartialState:
    """Make Hugging Face's libraries see a process with a rank, on a device, without collectives of their own. Return its state."""
    state = PartialState(cpu=is_on_cpu)
    for shared in (PartialState._shared_state, AcceleratorState._shared_state):
        if shared:
            shared.update(
                num_processes=here.virtual_workers,
                process_index=here.rank,
                local_process_index=here.rank,
                distributed_type=DistributedType.NO,
                device=here.device,
            )
    return state
