"""The demo: verl trains a small policy to add, on rewards from a served reward model."""
