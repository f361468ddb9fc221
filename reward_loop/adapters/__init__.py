"""Other trainers: each adapter is imported by its own path."""
