"""Ratios by layer under a budget, after DominoSearch: ``nmrun ratios``."""
