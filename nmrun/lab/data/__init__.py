"""Data sets, as plain tensors."""
