"""Files of users: recipes, JSON, paths. Nothing here imports torch, so that the command line answers at once."""
