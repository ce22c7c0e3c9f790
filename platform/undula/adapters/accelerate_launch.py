"""Launch of scripts that were written for Accelerate."""

from collections.abc import Callable
from functools import partial

from undula.adapters import script
from undula.errors import UsageError

script.expect_launch()


def launch(main: Callable[[], object]) -> None:
    """Train a script that was written for Accelerate as a job.

    Args:
        main: Main function of the script. See `undula.adapters.script.launch`.
    """
    script.launch(partial(explained, main))


def explained(main: Callable[[], object]) -> None:
    """Run the main function of a script, and say what to do if it uses a part of Accelerate that needs Accelerate's own Accelerator.

    Raises:
        UsageError: It does.
    """
    try:
        main()
    except RuntimeError as error:
        if "initialize the accelerate state" not in str(error):
            raise
        raise UsageError(
            "the script uses accelerate.logging.get_logger() or another part of Accelerate that needs Accelerate's own Accelerator; log "
            "with logging.getLogger(__name__), and use what undula.adapters.accelerate has"
        ) from error
