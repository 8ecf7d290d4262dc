"""Data sets, tasks, models and verbs that only a paper's table needs; a smoke test each holds them.

They reach the laboratory by the entry points ``nmrun.datasets``, ``nmrun.models`` and
``nmrun.verbs``, as any other package's do.
"""
