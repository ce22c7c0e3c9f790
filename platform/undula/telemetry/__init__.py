"""Reports of a run during training: to the ledger, TensorBoard, Prometheus and the live view in the driver."""
