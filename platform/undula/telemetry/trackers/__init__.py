"""Trackers of the library. A module here is all that a tracker needs: its settings, its checks and its writer. `registry` finds it.

The name of the module is the tracker's key in the YAML. The command line imports all of these modules for the schema of a job, so they
import heavy libraries, also Arrow by way of `undula.storage`, where they are used.
"""
