"""State of the process that Accelerate keeps for all of its users: its Accelerator, its loggers and Hugging Face's Trainer."""

import sys

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import operations

from undula.adapters.script import Place
from undula.errors import UsageError


def shared_state(here: Place, is_on_cpu: bool) -> PartialState:
    """Make Hugging Face's libraries see a process with a rank, on a device, without collectives of their own. Return its state."""
    state = PartialState(cpu=is_on_cpu)
    for shared in (PartialState._shared_state, AcceleratorState._shared_state):
        if shared:
            shared.update(
                num_processes=here.virtual_workers,
                process_index=here.rank,
                local_process_index=here.rank,
                distributed_type=_NotDistributed("NO"),
                device=here.device,
            )
    return state


class _NotDistributed(str):
    """The value of DistributedType.NO, which functions of accelerate.utils ask for before they begin a collective.

    A single process would get its own value from them, although the script sees several processes.
    """

    value = "NO"
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        call, frame = "", sys._getframe(1)
        while frame.f_back and frame.f_code.co_filename == operations.__file__:
            name, frame = frame.f_code.co_name, frame.f_back
            call = call if name.startswith("_") or name == "wrapper" else name
        if call:
            raise UsageError(
                f"{call}() of accelerate.utils was called, but the number of workers decides how many processes there are, and which "
                "batches each has; use what the Accelerator or the Trainer has for metrics, such as accelerator.gather_for_metrics() in an "
                "evaluation, and compute a loss from its batch alone"
            )
        return str.__eq__(self, other)
