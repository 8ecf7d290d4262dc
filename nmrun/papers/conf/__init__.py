"""The presets of the data sets and models, in the layout of Hydra's config groups."""
