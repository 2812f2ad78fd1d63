"""GPUs, NVLink islands, NICs and rails, leaf and spine switches, and how to read them."""
