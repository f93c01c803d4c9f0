"""What the commands of Hocket's packages share: text, progress, exit codes. Needs rich and typer."""
