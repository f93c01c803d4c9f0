"""Values on their way from the loop to the loggers."""
