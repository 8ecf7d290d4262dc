"""A ``--user-dir`` for fairseq-train: ``--user-dir "$(python -m nmrun.integrations.fairseq)"``.

Importing this package imports neither fairseq nor torch. fairseq imports the folder ``nmrun_fairseq`` by
its own name, so it has a name that nothing else has.
"""
