"""All of Hocket: the trainer, its siblings, recipes and the hocket command."""
