"""The optimizer that the learners share."""

import functools

import optax


def make_optimizer(
  learning_rate: float,
  *,
  name: str = 'adam',
  schedule: str = 'constant',
  total_steps: int | None = None,
  max_grad_norm: float | None = None,
  weight_decay: float = 0.0,
  eps: float = 1e-5,
) -> optax.GradientTransformation:
  """Adam or RAdam behind a clip of the gradient's global norm.

  RAdam holds its steps back while its second moment rests on few gradients
  (Liu et al., 2020). With weight decay Adam is AdamW (Loshchilov and Hutter,
  2019), and shrinks every parameter by `learning_rate * weight_decay` per
  step, biases too. Mask it with `optax.masked` where that is not wanted.

  Args:
    learning_rate: Step size at the first step, above 0.
    name: `'adam'` or `'radam'`.
    schedule: `'constant'`, or `'linear'`: straight down to 0 at `total_steps`.
    total_steps: Number of optimizer steps of a `'linear'` schedule.
    max_grad_norm: Global norm that no gradient exceeds; `None` does not clip.
    weight_decay: Decay per unit of learning rate, at least 0.
    eps: What Adam adds to the root of the second moment.

  Returns:
    An `optax.GradientTransformation`, whose state holds vectors of as many
    numbers as there are parameters.

  Raises:
    ValueError: If name or schedule are unknown, or a schedule is linear without
      `total_steps`.
  """
  if schedule == 'linear':
    if total_steps is None:
      raise ValueError("`schedule='linear'` needs `total_steps`, got None")
    learning_rate = optax.linear_schedule(learning_rate, 0.0, total_steps)
  elif schedule != 'constant':
    raise ValueError(
      f"`schedule` must be 'constant' or 'linear', got {schedule!r}"
    )
  makers = {'adam': optax.adam, 'radam': optax.radam}
  if name not in makers:
    raise ValueError(f"`name` must be 'adam' or 'radam', got {name!r}")
  make = makers[name]
  if weight_decay and name == 'adam':
    make = functools.partial(optax.adamw, weight_decay=weight_decay)
  elif weight_decay:
    raise ValueError(f'`weight_decay` must be 0 for RAdam, got {weight_decay}')
  clip = (
    optax.identity()
    if max_grad_norm is None
    else optax.clip_by_global_norm(max_grad_norm)
  )
  # On all parameters as one vector: few operations, however many leaves.
  return optax.flatten(optax.chain(clip, make(learning_rate, eps=eps)))
