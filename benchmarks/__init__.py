"""Measurements of hpjob's own runtime; every script prints JSON and keeps it under ``results/``."""
