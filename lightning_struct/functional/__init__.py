"""The mathematics: pure functions on tensors, on torch alone."""

from lightning_struct.functional.curvature.preconditioner import (
    empirical_fisher_diagonal,
    fisher_scaling,
    jacobi_scaling,
    randomized_gauss_newton_diagonal,
)
from lightning_struct.functional.jacobian.derivatives import Derivatives, laplacian, partial_derivatives
from lightning_struct.functional.jacobian.gauss_newton import linearize
from lightning_struct.functional.jacobian.linearization import Linearization
from lightning_struct.functional.jacobian.losses import BinaryCrossEntropy, CrossEntropy, GaussNewtonLoss, SquaredError
from lightning_struct.functional.layers.calls import LayerCall
from lightning_struct.functional.layers.gradient_norms import (
    gradient_variance,
    norm_test_batch_size,
    per_sample_gradient_norms,
    required_batch_size,
)
from lightning_struct.functional.layers.kinds import Matrix
from lightning_struct.functional.layers.per_sample.recorder import GradientNormRecorder, ParameterNorms
from lightning_struct.functional.layers.registry import register_layer, unregister_layer
from lightning_struct.functional.residuals.jacobians import DenseJacobian, Jacobian
from lightning_struct.functional.residuals.residuals import LeastSquares
from lightning_struct.functional.solvers.conjugate_gradient import ConjugateGradientResult, conjugate_gradient
from lightning_struct.functional.solvers.curve_fit import CurveFit, curve_fit, levenberg_marquardt
from lightning_struct.functional.solvers.damping import ScaledDamping, next_batch_rule, reduction_ratio_rule
from lightning_struct.functional.solvers.factored_least_squares import (
    GramLeastSquares,
)
from lightning_struct.functional.solvers.least_squares import LeastSquaresResult, RightPreconditioner, lsmr
from lightning_struct.functional.solvers.line_search import LineSearchResult, armijo
from lightning_struct.functional.solvers.projected_least_squares import ProjectedLeastSquares
from lightning_struct.functional.structured.displacement import (
    displacement_rank,
    krylov_matrix,
    ldr_matmul,
    ldr_to_dense,
    sylvester_displacement,
)
from lightning_struct.functional.structured.operators import (
    DisplacementOperator,
    ShiftOperator,
    SubdiagonalOperator,
    TridiagonalOperator,
)
from lightning_struct.functional.structured.subdiagonal import subdiagonal_matmul, subdiagonal_to_dense
from lightning_struct.functional.structured.transforms import (
    cauchy_like_matmul,
    circulant_matmul,
    hadamard_transform,
    hankel_like_matmul,
    toeplitz_like_matmul,
    vandermonde_like_matmul,
)
from lightning_struct.functional.structured.tridiagonal import tridiagonal_matmul, tridiagonal_to_dense

__all__ = [
    "BinaryCrossEntropy", "ConjugateGradientResult", "CrossEntropy", "CurveFit", "DenseJacobian", "Derivatives",
    "DisplacementOperator", "GaussNewtonLoss", "GradientNormRecorder", "GramLeastSquares",
    "Jacobian", "LayerCall", "LeastSquares", "LeastSquaresResult", "LineSearchResult", "Linearization", "Matrix",
    "ParameterNorms", "ProjectedLeastSquares", "RightPreconditioner", "ScaledDamping", "ShiftOperator",
    "SquaredError", "SubdiagonalOperator", "TridiagonalOperator", "armijo", "cauchy_like_matmul", "circulant_matmul",
    "conjugate_gradient", "curve_fit", "displacement_rank", "empirical_fisher_diagonal", "fisher_scaling",
    "gradient_variance", "hadamard_transform", "hankel_like_matmul", "jacobi_scaling", "krylov_matrix", "laplacian",
    "ldr_matmul", "ldr_to_dense", "levenberg_marquardt", "linearize", "lsmr", "next_batch_rule",
    "norm_test_batch_size", "partial_derivatives", "per_sample_gradient_norms", "randomized_gauss_newton_diagonal",
    "reduction_ratio_rule", "register_layer", "required_batch_size", "subdiagonal_matmul", "subdiagonal_to_dense",
    "sylvester_displacement", "toeplitz_like_matmul", "tridiagonal_matmul", "tridiagonal_to_dense",
    "unregister_layer", "vandermonde_like_matmul",
]  # fmt: skip
