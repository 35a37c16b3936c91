"""Strictness that every test runs under."""

import os

# Nearly all of a test's time is compilation: compile fast rather than well.
os.environ.setdefault(
  'XLA_FLAGS',
  '--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true',
)

# ruff: noqa: E402
import hypothesis
import jax

jax.config.update('jax_numpy_rank_promotion', 'raise')

# Examples compile; to shrink one takes minutes, so ask for it when needed:
# pytest --hypothesis-profile=shrink.
_PHASES = tuple(p for p in hypothesis.Phase if p.name != 'shrink')
hypothesis.settings.register_profile('shrink', deadline=None)
# In CI the same examples every time; elsewhere new ones.
hypothesis.settings.register_profile(
  'hkgraph',
  deadline=None,
  derandomize='CI' in os.environ,
  max_examples=25,
  phases=_PHASES,
  print_blob=True,
)
hypothesis.settings.load_profile('hkgraph')
