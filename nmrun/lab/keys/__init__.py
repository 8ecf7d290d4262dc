"""What a checked config is made of: typed groups of keys, which the code below the config reads."""
