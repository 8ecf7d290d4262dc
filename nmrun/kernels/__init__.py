"""Compiled kernels: C on the CPU, Triton on CUDA devices, each beside the torch reference whose
bits it has.
"""
