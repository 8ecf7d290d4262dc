"""Whole small programs on top of the library. Each runs as ``python -m nmrun.examples.<name>``."""
