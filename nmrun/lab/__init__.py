"""The laboratory: runs, sweeps, comparisons; everything that imports Hydra or pandas."""
