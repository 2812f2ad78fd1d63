"""Expert parallelism: tokens travel to the ranks of their experts and back."""
