"""The only part of the control plane that touches tensors: it runs what a plan asks."""
