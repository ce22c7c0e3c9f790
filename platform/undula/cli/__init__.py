"""The command line: `undula ...`, one file a command, and the command line of a job's own script."""
