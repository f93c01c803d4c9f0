"""The ranks of a job: the place of each, their mesh and exchanges, and the diagnosis of those that fail."""
