"""Settings that data sets share: defaults, checks of arguments, sizes, weights, and ranks of this process."""
