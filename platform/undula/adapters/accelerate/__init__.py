"""A stand-in for Hugging Face Accelerate's `Accelerator`, with which a loop that was written for it trains elastically.

from undula.adapters.accelerate import Accelerator, launch      # in place of accelerate's
...
for epoch in accelerator.epochs(num_epochs):                    # in place of range(num_epochs)
...
launch(main)                                                    # in place of main()
"""

from undula.errors import one_sentence, require_tested

with one_sentence():
    require_tested("accelerate")
    from undula.adapters.accelerate.accelerator import Accelerator
    from undula.adapters.script import expect_launch, launch

expect_launch()
__all__ = ["Accelerator", "launch"]
