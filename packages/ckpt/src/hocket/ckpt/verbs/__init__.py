"""Operations on whole checkpoints, each in a module of its name; retention, and the list of checkpoints."""
