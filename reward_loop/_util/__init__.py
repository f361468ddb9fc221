"""Small helpers that any part may import; each imports nothing of the package but errors and types."""
