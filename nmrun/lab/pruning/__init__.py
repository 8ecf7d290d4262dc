"""What is done with a trained network: the verb ``prune``."""
