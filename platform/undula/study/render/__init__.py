"""The report of a study: figures, tables and one self-contained HTML page."""
