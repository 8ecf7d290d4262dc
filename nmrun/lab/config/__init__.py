"""The config of a run: composed by Hydra, checked, identified. Nothing in here imports torch."""
