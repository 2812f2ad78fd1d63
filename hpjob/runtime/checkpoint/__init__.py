"""Checkpoints that are complete or absent, verified before use, and loaded by any mesh."""
