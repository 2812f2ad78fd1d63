"""Job specification, job script, submission, job states, requeue and successor logic."""
