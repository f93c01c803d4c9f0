"""Messages between the ranks of a save or load, and the errors that they tell each other."""
