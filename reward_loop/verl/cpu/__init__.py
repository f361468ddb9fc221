"""verl on a CPU: a platform, an FSDP2 engine and a rollout server, to debug a reward pipeline on a laptop.

verl loads :mod:`reward_loop.verl.cpu.plugin` in every process through ``VERL_USE_EXTERNAL_MODULES``. This package must
not import verl itself: Ray may unpickle an object of this package before verl has finished importing.
"""
