"""Examples: ``arithmetic/`` is the demo (``make demo``), ``gsm8k/`` a reward function.

The modules of this folder are shared by the demo, the benchmarks and the tests.
"""
