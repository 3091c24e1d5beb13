"""A small mutation tool: it breaks one guard of djjobs at a time and says whether a test notices. See `run.py`."""
