"""Recipes: whole training jobs to read, run and start from, and the `hocket` command with its demo."""
