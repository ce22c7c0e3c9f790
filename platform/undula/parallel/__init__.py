"""Distribution of a step over ranks: the layout of the ranks, the engines that run a model, and the reduction of gradients."""
