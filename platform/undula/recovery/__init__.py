"""What brings a run back: snapshots in memory, their replicas on the head node, restore, and state kept between two groups."""
