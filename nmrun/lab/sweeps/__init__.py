"""The jobs of a command: one run, or those of sweeps, one after the other or side by side."""
