"""The run folder: how it is written, read and checked, what was asked for it, and what made it."""
