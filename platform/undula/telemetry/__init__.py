"""What a run tells: rank 0 writes the ledger and sends messages to the hub of the run.

The driver follows both: the live view and Prometheus show the messages at once, and trackers, such as TensorBoard and MLflow, receive each
step of the ledger exactly once.
"""
