"""The model of one pipeline stage: transformers' layers, our embedding, head and placement."""
