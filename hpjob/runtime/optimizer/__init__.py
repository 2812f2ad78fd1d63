"""AdamW on local shards, its schedule, and clipping over the whole mesh."""
