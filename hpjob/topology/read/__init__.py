"""Readers of what machines, clusters and clouds print about their topology; one file a source."""
