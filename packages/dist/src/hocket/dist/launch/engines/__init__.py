"""The jobs that engines run, and their submission: a script for Slurm, a manifest for Kubernetes."""
