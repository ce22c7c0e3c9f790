"""Report of a study: figures, tables and one self-contained HTML page."""
