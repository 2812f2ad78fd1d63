"""Random faults on a real Slurm, and what has to be left of a run after each of them."""
