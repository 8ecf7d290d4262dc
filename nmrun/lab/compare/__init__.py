"""Runs compared: read into a DataFrame, folded into tables, tested against a baseline."""
