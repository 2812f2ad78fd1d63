"""Hugging Face folders: weights read from them into any layout, and checkpoints exported to them."""
