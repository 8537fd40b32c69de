"""Looking inside: pictures of patterns. Imports core, never a part."""
