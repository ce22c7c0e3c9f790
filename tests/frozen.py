"""Last import of a process that forks: otherwise, the first garbage collection in each fork would copy the pages of all objects."""

import gc

gc.collect()
gc.freeze()
