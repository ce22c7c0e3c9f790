"""A stand-in for Lightning's Trainer, with which a LightningModule trains elastically.

from undula.adapters.lightning import Trainer, launch           # in place of Lightning's Trainer
...
launch(main)                                                    # in place of main()

In the train function of `undula.main`, whose YAML has the plan, `fit(run, module, datamodule)` does the same.
"""

from undula.errors import one_sentence, require_tested

with one_sentence():
    require_tested("pytorch-lightning", "lightning")
    from undula.adapters.lightning.library import require_lightning

    require_lightning()
    from undula.adapters.lightning.fit import fit
    from undula.adapters.lightning.trainer import Trainer
    from undula.adapters.script import expect_launch, launch

expect_launch()
__all__ = ["Trainer", "fit", "launch"]
