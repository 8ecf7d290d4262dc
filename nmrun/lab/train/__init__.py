"""The application: one run, from a checked config to a run folder."""
