"""Equal tuning: every recipe of a comparison gets the same number of trials, then its seeds."""
