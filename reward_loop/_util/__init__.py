"""Small helpers for all parts of the package. Of the rest of the package they import only errors and types."""
