"""Pipeline parallelism: stages, the check of what they compute, and their schedule."""
