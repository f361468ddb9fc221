"""The programs behind ``docs/dev/benchmarks.md``. Run them from the root of a clone: ``python -m benchmarks.NAME``."""
