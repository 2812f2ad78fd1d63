"""Sequence parallelism: zigzag ring, Ulysses, and gather/scatter around tensor-parallel linears."""
