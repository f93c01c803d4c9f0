"""A save as each rank runs it: plan, staging, background thread, data file, and the ranks' reports."""
