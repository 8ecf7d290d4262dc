"""N:M products on CPUs, for training and for inference."""
