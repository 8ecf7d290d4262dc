"""FinishedRun runs in the formats that others read: ``nmrun export RUN --to DIR --format ...``, one
module a format.
"""
