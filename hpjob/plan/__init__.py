"""Degrees, placement of every rank, memory and time estimates, and the reasons for them."""
