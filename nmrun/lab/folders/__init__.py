"""Verbs that look into run folders: ``nmrun status``, ``compare`` and ``rm``."""
