"""The programs behind ``docs/benchmarks.md``. Run them from the root of a clone: ``python -m benchmarks.NAME``."""
