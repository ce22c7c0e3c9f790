"""Clusters that come and go on one machine, and faults as a schedule: for our tests, and for users' tests of their own jobs."""
