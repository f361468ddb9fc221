"""Worker processes for sync reward functions. This package imports nothing, so that workers start with few modules."""
