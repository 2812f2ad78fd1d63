"""Executes a plan: mesh, parallel layers, train loop, checkpoint, signals.

The only package that may import torch or transformers.
"""
