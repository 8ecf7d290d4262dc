"""What hangs on the optimizer: the order of a step, and what is saved and comes back."""
