"""Channel permutation: an order of the inputs in which N:M masks keep more."""
