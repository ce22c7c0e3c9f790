"""What a run reports while it trains, to the ledger, TensorBoard, Prometheus and the live view in the driver."""
