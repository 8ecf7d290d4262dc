"""A ``--user-dir`` for fairseq-train: ``--user-dir "$(python -m nmrun.integrations.fairseq)"``.

Importing this package imports neither fairseq nor torch; ``plugin`` is what fairseq imports.
"""
