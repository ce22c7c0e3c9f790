"""Reports of a run: terminal output and one self-contained HTML page."""
