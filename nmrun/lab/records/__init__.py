"""Verbs that look into run folders: ``nmrun status`` and ``compare``."""
