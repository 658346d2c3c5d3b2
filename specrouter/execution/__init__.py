"""The execution of plans, the only part of the control plane that uses tensors."""
