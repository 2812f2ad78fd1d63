"""Live detection: of this node, of the nodes of a job, of a cluster from its login node."""
