"""The loop as a flow: Runge-Kutta steps of ``dz/dt = F(z) - z``, F being one whole loop (systems.md section 11).

With the residual inside F the plain loop ``z <- F(z)`` is the Euler step of size 1. It is written
``(1 - dt) z + dt F(z)``: ``z + dt (F(z) - z)`` is not F(z) at dt = 1 in floating point.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

Solver = Literal["euler", "midpoint", "rk4"]


def solver_step(
    solver: Solver,
    loop: Callable[[Tensor], Tensor],
    z: Tensor,
    dt: float,
    align: Callable[[Tensor], Tensor] = lambda z: z,
) -> Tensor:
    """One step of size ``dt`` from ``z``.

    Args:
        solver: ``euler``, ``midpoint`` or ``rk4`` (the classical one): order 1, 2 or 4 for 1, 2 or 4 evaluations of F.
        loop: F; the same function in all evaluations of a step.
        z: The state, any shape.
        dt: Step size; at 1 the Euler step is ``loop(z)``, bit for bit and without further arithmetic.
        align: Brings z to the tokens that the first evaluation has left of it, where it merges some.
    """
    if solver == "euler":
        new = loop(z)
        return new if dt == 1 else (1 - dt) * align(z) + dt * new

    def field(state: Tensor) -> Tensor:
        return loop(state) - state

    k1 = loop(z)
    z = align(z)
    k1 = k1 - z
    k2 = field(z + dt / 2 * k1)
    if solver == "midpoint":
        return z + dt * k2
    k3 = field(z + dt / 2 * k2)
    k4 = field(z + dt * k3)
    return z + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
