"""A real Slurm on one machine: one slurmctld, one slurmd per virtual node. Standard library only."""
