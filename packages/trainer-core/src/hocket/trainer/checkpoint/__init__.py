"""The run on disk: what is saved, when, and how it is taken up again."""
