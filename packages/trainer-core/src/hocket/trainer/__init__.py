"""The training loop of Hocket: events, engine, state, time, callbacks, loggers."""
