"""Kernels of the 2:4 products: cuSPARSELt, and packing in Triton."""
