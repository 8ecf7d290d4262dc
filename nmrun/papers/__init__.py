"""Data sets, tasks and models that only a paper's table needs. They run; a smoke test each holds them.

They reach the laboratory as any other package's do, by the entry points ``nmrun.datasets`` and
``nmrun.models``: nothing imports this package.
"""
