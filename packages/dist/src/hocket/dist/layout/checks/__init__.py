"""The checks of a model before it is laid out, and of what it computes in the first passes."""
