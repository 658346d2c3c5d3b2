"""Small models padded to the cost of large ones, for benchmarks."""
