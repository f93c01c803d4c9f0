"""The memory that a layout needs on each rank, and advice when it runs out."""
