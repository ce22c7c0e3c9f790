"""Tools to test jobs under faults: clusters on one machine whose nodes come and go, schedules of faults, and a conformance suite.

They are part of the package so that users can test their own jobs, models and optimizers.
"""
