"""Studies of learning rate and batch size: what they run, what is fitted, their report, and the arithmetic that checks it."""
