"""Parallel layers and gradient handling, on local tensors."""
