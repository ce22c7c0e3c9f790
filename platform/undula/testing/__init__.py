"""Tools for tests under faults: clusters on one machine whose nodes come and go, and schedules of faults. Users can test their own jobs."""
