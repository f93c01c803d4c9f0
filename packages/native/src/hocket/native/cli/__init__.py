"""Shared parts of the commands of Hocket's packages: text, progress, exit codes. Needs rich and typer."""
