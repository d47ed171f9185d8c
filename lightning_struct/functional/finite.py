"""The error for NaN or infinity where training needs numbers."""


class NotFinite(ValueError, FloatingPointError):
    """NaN or infinity in data, weights, outputs or a loss: training has diverged, or something is damaged.

    It is a ``ValueError``, as other refusals of a step are, and a ``FloatingPointError``, as what solvers find amidst
    their products is: by that the command line of the recipes tells it from a defect.
    """
