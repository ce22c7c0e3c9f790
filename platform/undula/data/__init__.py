"""Data sets of sharded Parquet: manifest, reader, the stream at a position, and writers."""
