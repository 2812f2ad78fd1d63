"""A runtime without torch, put in place of the real one by `sitecustomize`."""
