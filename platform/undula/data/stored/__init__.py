"""Data sets of sharded Parquet: the manifest, the reader with its cache, and the streams of a rank, which start at any position."""
