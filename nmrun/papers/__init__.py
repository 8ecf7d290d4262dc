"""Data sets, tasks and models that only a paper's table needs; a smoke test each holds them.

They reach the laboratory by the entry points ``nmrun.datasets`` and ``nmrun.models``, as any other
package's do.
"""
