"""Recipes: whole training jobs to read, run and start from, and the `hocket` command with its demo.

- `gpt`, `mixture`, `language`, `images`, `embeddings`, `diffusion`: the recipes, each in one file
- `recipe`, `corpus`: what recipes share, and the text that they train on
- `cli`: the command `hocket`
- `config`: a run from a file, `hocket train`
- `demo`, `train`: `hocket demo`, and the job that it trains
- `replay`, `samples`, `environment`: `hocket replay`, `hocket samples` and `hocket env`
"""
