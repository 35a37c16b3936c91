"""Strictness that every test runs under."""

import hypothesis
import jax

jax.config.update('jax_numpy_rank_promotion', 'raise')

hypothesis.settings.register_profile(
  'hkgraph', deadline=None, max_examples=25, print_blob=True
)
hypothesis.settings.load_profile('hkgraph')
