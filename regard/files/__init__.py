"""Read the files of users: recipes, JSON, paths. Nothing here imports torch, so that the command line starts fast."""
