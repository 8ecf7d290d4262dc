"""Texts: running text for language models, and labelled texts."""
