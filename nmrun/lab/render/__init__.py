"""Comparisons shown: tables to be read, pictures, the pages of ``nmrun report``."""
