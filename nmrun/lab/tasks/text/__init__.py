"""Texts: running ones, whose next token a model learns, and those with labels."""
