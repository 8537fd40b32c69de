"""Families of models, a file for each."""
