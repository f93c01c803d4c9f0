"""Data sets on a hub of Hugging Face: the commit that is read, and the files of a configuration and split."""
