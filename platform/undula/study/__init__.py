"""Studies of learning rate and batch size: what they run, what is fitted to their results, and the arithmetic that checks both."""
