"""Finished runs in the formats that other tools read: ``nmrun export RUN --to DIR --format ...``, one
module a format.
"""
