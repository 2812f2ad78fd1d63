"""Token files: how text becomes tokens, and how ranks read them. ``prepare`` and its helpers need no torch."""
