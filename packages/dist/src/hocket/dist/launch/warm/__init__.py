"""Ranks that are forked from one process, which has imported torch and Hocket before."""
