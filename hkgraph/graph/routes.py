"""Curves along which connections run in the picture of a graph."""

from collections.abc import Sequence
import itertools
import math
from typing import Any

from hkgraph.graph import layout as layout_lib

Point = tuple[float, float]
Curve = tuple[Point, Point, Point, Point]  # Control points, cubic Bezier.

_BOWS = (0, 1, -1, 2, -2, 3, -3)
_STEPS = 24
_MAX_ROUTED = 400  # More connections than this run over each other anyway.


def route(layout: layout_lib.Layout, connections: Sequence[Any]) -> list[Curve]:
  """A curve for each connection, by preference over no other population."""
  routed = len(connections) <= _MAX_ROUTED
  return [
    _free_curve(layout, c) if routed else _curve(layout, c, c.index)
    for c in connections
  ]


def point(curve: Curve, t: float) -> Point:
  """Where the curve is at `t`, from 0 (its start) to 1 (its end)."""
  s = 1 - t
  (ax, ay), (bx, by), (cx, cy), (dx, dy) = curve
  a, b, c, d = s**3, 3 * s * s * t, 3 * s * t * t, t**3
  return a * ax + b * bx + c * cx + d * dx, a * ay + b * by + c * cy + d * dy


def _free_curve(layout, c) -> Curve:
  curves = [_curve(layout, c, bow) for bow in _BOWS]
  others = [b for n, b in layout.boxes.items() if n not in (c.src, c.dst)]
  free = (curve for curve in curves if not _hits(curve, others))
  return next(itertools.islice(free, c.index, None), curves[0])


def _hits(curve: Curve, boxes: Sequence[layout_lib.Box]) -> bool:
  points = [point(curve, i / _STEPS) for i in range(1, _STEPS)]
  return any(
    abs(x - b.x) < 0.55 * b.width and abs(y - b.y) < 0.6 * b.height
    for b in boxes
    for x, y in points
  )


def _curve(layout, c, bow: int) -> Curve:
  """A curve by the places of its ends; `bow` bends it more or less."""
  src, dst = layout.boxes[c.src], layout.boxes[c.dst]
  if src == dst:
    return _loop(src, c.index)
  if src.hub and src.hub == dst.hub:
    return _chord(src, dst, c.index)
  if src.column < dst.column:
    return _forward(src, dst, bow)
  if src.column == dst.column:
    return _sideways(src, dst, c.index, layout.gap)
  return _backward(src, dst, bow)


def _loop(box, index: int) -> Curve:
  outward = math.pi / 2
  if box.hub:
    outward = math.atan2(box.y - box.hub[1], box.x - box.hub[0])
  reach = box.height * (1.1 + 0.7 * index)
  sides = (outward + 0.5, outward - 0.5)
  a, b = (_edge(box, angle) for angle in sides)
  u, v = ((reach * math.cos(g), reach * math.sin(g)) for g in sides)
  return (a, (a[0] + u[0], a[1] + u[1]), (b[0] + v[0], b[1] + v[1]), b)


def _edge(box, angle: float) -> Point:
  """Where a ray from the center leaves the frame."""
  dx, dy = math.cos(angle), math.sin(angle)
  reach = min(
    box.width / 2 / max(abs(dx), 1e-9), box.height / 2 / max(abs(dy), 1e-9)
  )
  return box.x + dx * reach, box.y + dy * reach


def _chord(src, dst, index: int) -> Curve:
  hx, hy = src.hub
  a = _edge(src, math.atan2(hy - src.y, hx - src.x))
  b = _edge(dst, math.atan2(hy - dst.y, hx - dst.x))
  side = 0.08 * (1 + index)
  nx, ny = side * (b[1] - a[1]), side * (a[0] - b[0])
  return (
    a,
    (a[0] + 0.4 * (hx - a[0]) + nx, a[1] + 0.4 * (hy - a[1]) + ny),
    (b[0] + 0.4 * (hx - b[0]) + nx, b[1] + 0.4 * (hy - b[1]) + ny),
    b,
  )


def _forward(src, dst, bow: int) -> Curve:
  a = (src.x + src.width / 2, src.y)
  b = (dst.x - dst.width / 2, dst.y)
  reach = 0.45 * (b[0] - a[0])
  lift = 0.9 * bow * src.height
  return (a, (a[0] + reach, a[1] + lift), (b[0] - reach, b[1] + lift), b)


def _sideways(src, dst, index: int, gap: float) -> Curve:
  side = 1 if src.y > dst.y else -1
  a = (src.x + side * src.width / 2, src.y - side * src.height / 5)
  b = (dst.x + side * dst.width / 2, dst.y + side * dst.height / 5)
  rows = abs(src.y - dst.y) / src.height
  bulge = src.height * (0.5 + 0.16 * rows + 0.5 * index)
  bulge = 1.2 * side * gap * (1 - math.exp(-bulge / gap))
  x = max(a[0] * side, b[0] * side) * side + bulge
  return (a, (x, a[1]), (x, b[1]), b)


def _backward(src, dst, bow: int) -> Curve:
  side = -1 if bow < 0 else 1
  a = (src.x - 0.36 * src.width, src.y + side * src.height / 2)
  b = (dst.x + 0.36 * dst.width, dst.y + side * dst.height / 2)
  rise = 0.25 * (a[0] - b[0]) + abs(bow) * src.height
  top = side * (max(side * a[1], side * b[1]) + rise)
  return (a, (a[0], top), (b[0], top), b)
