"""Kernels in C, for the CPU: their source, the library that is made of it, and its functions."""
