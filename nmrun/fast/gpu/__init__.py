"""2:4 products on GPUs, for training and for inference."""
