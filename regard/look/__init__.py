"""Looking inside models and runs: summaries, pictures and profiles. It imports core, never a part."""
