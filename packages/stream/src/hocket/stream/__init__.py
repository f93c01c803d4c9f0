"""Training data read from object storage in a global order that no topology changes."""
