"""The optimizer that the learners share."""

import optax


def make_optimizer(
  learning_rate: float,
  *,
  schedule: str = 'constant',
  total_steps: int | None = None,
  max_grad_norm: float | None = None,
  weight_decay: float = 0.0,
  eps: float = 1e-5,
) -> optax.GradientTransformation:
  """Adam behind a clip of the gradient's global norm.

  With weight decay it is AdamW (Loshchilov and Hutter, 2019), which shrinks
  every parameter by `learning_rate * weight_decay` per step, biases too. Mask
  it with `optax.masked` where that is not wanted.

  Args:
    learning_rate: Step size at the first step, above 0.
    schedule: `'constant'`, or `'linear'`: straight down to 0 at `total_steps`.
    total_steps: Number of optimizer steps of a `'linear'` schedule.
    max_grad_norm: Global norm that no gradient exceeds; `None` does not clip.
    weight_decay: Decay per unit of learning rate, at least 0.
    eps: What Adam adds to the root of the second moment.

  Returns:
    An `optax.GradientTransformation`.

  Raises:
    ValueError: If the schedule is unknown, or linear without `total_steps`.
  """
  if schedule == 'linear':
    if total_steps is None:
      raise ValueError("`schedule='linear'` needs `total_steps`, got None")
    learning_rate = optax.linear_schedule(learning_rate, 0.0, total_steps)
  elif schedule != 'constant':
    raise ValueError(
      f"`schedule` must be 'constant' or 'linear', got {schedule!r}"
    )
  return optax.chain(
    optax.identity()
    if max_grad_norm is None
    else optax.clip_by_global_norm(max_grad_norm),
    optax.adamw(learning_rate, eps=eps, weight_decay=weight_decay)
    if weight_decay
    else optax.adam(learning_rate, eps=eps),
  )
