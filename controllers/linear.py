"""Linear algebra of the control law's tick, compiled into it, in place and without memory of its own.

What numba keeps of the tick on disk does not look at this file: whoever changes it changes tick.py too.
"""

import math

from numba import njit

compiled = njit(error_model="numpy")


@compiled
def principal(a, u, work):
    """a <- u^T a u, diagonal, with u [n, n] turned by Jacobi's rotations into eigenvectors (its columns) from
    those given, orthonormal.

    Near ones, of the tick before, need a sweep or two, and the others find nothing to do."""
    n = len(a)
    for i in range(n):
        for j in range(n):
            x = 0.0
            for k in range(n):
                x += a[i, k] * u[k, j]
            work[i, j] = x
    size = 0.0
    for i in range(n):
        for j in range(n):
            x = 0.0
            for k in range(n):
                x += u[k, i] * work[k, j]
            a[i, j] = x
        size += abs(a[i, i])
    for _ in range(12):
        for p in range(n - 1):
            for q in range(p + 1, n):
                if abs(a[p, q]) > 1e-14 * size:
                    h = 0.5 * (a[q, q] - a[p, p]) / a[p, q]
                    t = (1.0 if h >= 0 else -1.0) / (abs(h) + math.sqrt(h * h + 1))
                    c = 1 / math.sqrt(t * t + 1)
                    s = t * c
                    for k in range(n):
                        x, y = a[k, p], a[k, q]
                        a[k, p], a[k, q] = c * x - s * y, s * x + c * y
                    for k in range(n):
                        x, y = a[p, k], a[q, k]
                        a[p, k], a[q, k] = c * x - s * y, s * x + c * y
                        x, y = u[k, p], u[k, q]
                        u[k, p], u[k, q] = c * x - s * y, s * x + c * y


@compiled
def cholesky(a, least):
    """The lower factor of a symmetric matrix, in its place; pivots below `least` become it."""
    for j in range(len(a)):
        x = a[j, j]
        for k in range(j):
            x -= a[j, k] * a[j, k]
        a[j, j] = math.sqrt(max(x, least) if x == x else x)
        for i in range(j + 1, len(a)):
            x = a[i, j]
            for k in range(j):
                x -= a[i, k] * a[j, k]
            a[i, j] = x / a[j, j]


@compiled
def solve(factor, x):
    """x <- (L L^T)^-1 x."""
    n = len(x)
    for i in range(n):
        for k in range(i):
            x[i] -= factor[i, k] * x[k]
        x[i] /= factor[i, i]
    for i in range(n - 1, -1, -1):
        for k in range(i + 1, n):
            x[i] -= factor[k, i] * x[k]
        x[i] /= factor[i, i]
