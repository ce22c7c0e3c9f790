"""How a step is spread over ranks: their layout, the engines that run a model on them, and the reduction of gradients."""
