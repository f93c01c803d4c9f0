"""This process: devices, random generators, clocks, optional packages, garbage."""
