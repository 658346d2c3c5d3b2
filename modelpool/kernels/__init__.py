"""CPU kernels in C: their source, the library compiled from it, and its functions."""
