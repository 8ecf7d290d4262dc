"""Finished runs in the formats that other tools read: ``nmrun export RUN --out DIR --format ...``, one
module a format.
"""
