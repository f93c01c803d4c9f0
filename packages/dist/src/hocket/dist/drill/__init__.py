"""Drills: a user's own job, into which one fault after the other is injected on one machine."""
