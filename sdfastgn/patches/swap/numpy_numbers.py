"""Recognizes NumPy's numbers by their classes. NumPy is not imported, because it may not be installed.

Arguments of models are often NumPy's numbers, such as a LoRA's scale that is taken from ``np.linspace``. An
array is no number here, not even one without dimensions: it can be written into, and diffusers' code refuses
it or computes in its dtype.
"""

from __future__ import annotations

import numbers


def is_numpy_real(kind: type) -> bool:
    """True for NumPy's classes of integers and of real floating-point numbers."""
    return kind.__module__ == "numpy" and issubclass(kind, numbers.Real)


def is_numpy_constant(kind: type) -> bool:
    """True for NumPy's classes of numbers, complex ones too, and for its bool."""
    return kind.__module__ == "numpy" and (
        issubclass(kind, numbers.Number) or kind.__name__ in ("bool", "bool_")
    )
