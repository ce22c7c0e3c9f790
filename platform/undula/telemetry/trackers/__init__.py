"""Trackers of the library. A module here is all that a tracker needs: its settings, its checks and its writer. `registry` finds it."""
