"""How the three matrix products of a sparse layer are computed."""
