"""Kernels of the N:M products, in C."""
