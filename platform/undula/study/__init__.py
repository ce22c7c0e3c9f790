"""Studies of learning rate and batch size: their trials, the fits to the results, the report, and the self-test of the arithmetic."""
