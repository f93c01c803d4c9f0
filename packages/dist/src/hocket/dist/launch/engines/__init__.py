"""The jobs that engines run: a script for Slurm, a manifest for Kubernetes, a command for Ray."""
