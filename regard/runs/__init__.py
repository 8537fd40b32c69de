"""The run folder: how it is written, read and checked; the job that was asked for, and the settings."""
