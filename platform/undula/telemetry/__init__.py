"""What a run reports while it trains: ledger, TensorBoard, Prometheus, and the live view in the driver."""
