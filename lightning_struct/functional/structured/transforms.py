"""Products with structured matrices whose operators are fixed: transforms, and the classes of Thomas et al., Table 5.

All take any leading shape, and compute in float32 at least; the result has the dtype to which those of the arguments
promote.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from lightning_struct.functional.checks import checked, require_real
from lightning_struct.functional.structured import arguments
from lightning_struct.functional.structured.cost_model import transform_length
from lightning_struct.functional.structured.operators import shift_krylov_rows
from lightning_struct.functional.structured.scaled_toeplitz import ScaledToeplitzSpectra, scaled_toeplitz_matmul


@checked
def toeplitz_like_matmul(G: Tensor, H: Tensor, x: Tensor, f: float | Tensor = 1.0, g: float | Tensor = -1.0) -> Tensor:
    """x Mᵀ for M = Σᵢ K(Z_f, gᵢ) K(Z_g, hᵢ)ᵀ, with p = min(m, n) columns in each Krylov matrix.

    This is equation (2) of Thomas et al. with A = Z_f and B = Z_gᵀ: its matrices are Toeplitz-like (section 2, Table
    5), Toeplitz matrices among them (r = 2). In 2 + 2r real Fourier transforms, O(r n log n), for each row of x.
    Differentiable in all tensors, as often as wanted.

    Args:
        G: (m, r).
        H: (n, r).
        x: (..., n).
        f: the corner of Z_f, in its first row and last column; the other entries, below the diagonal, are 1.
        g: that of Z_g.

    Returns:
        (..., m), in the dtype to which G and x are promoted. Half precision is computed in float32.

    Raises:
        ValueError, TypeError: the shapes or dtypes do not fit.

    Example:
        >>> G = H = torch.tensor([[1.0], [0.0], [0.0]])
        >>> toeplitz_like_matmul(G, H, torch.tensor([1.0, 2.0, 3.0])).round(decimals=4)    # M is the identity
        tensor([1., 2., 3.])
    """
    arguments.require_generators(G, H)
    arguments.require_vectors(x, H.shape[0])
    require_real(G=G, H=H, x=x)
    dtype = arguments.computing_dtype(G, H, x)
    parts = _parts(G.to(dtype), H.to(dtype), f, g)
    product = arguments.by_rows(lambda rows: scaled_toeplitz_matmul(rows, *parts), x, dtype)
    return product.to(torch.promote_types(G.dtype, x.dtype))


def toeplitz_like_to_dense(G: Tensor, H: Tensor, f: float | Tensor = 1.0, g: float | Tensor = -1.0) -> Tensor:
    """The matrix M (m, n) of :func:`toeplitz_like_matmul` as a product of its Krylov matrices, in O(r m n min(m, n)).

    That takes few operations, and large ones: it is meant for matrices with a short side.

    Args:
        G, H, f, g: as there.

    Returns:
        (m, n), in the dtype of G. Half precision is computed in float32.

    Raises:
        ValueError, TypeError: the shapes or dtypes do not fit.
    """
    arguments.require_generators(G, H)
    require_real(G=G, H=H)
    dtype, p = arguments.computing_dtype(G, H), min(G.shape[0], H.shape[0])
    return (shift_krylov_rows(G.to(dtype), f, p).mT @ shift_krylov_rows(H.to(dtype), g, p)).to(G.dtype)


def prepare_toeplitz_like(
    G: Tensor, H: Tensor, f: float | Tensor = 1.0, g: float | Tensor = -1.0
) -> ScaledToeplitzSpectra:
    """The matrix of :func:`toeplitz_like_matmul`, prepared for products ``.matmul(x)`` with weights that do not change.

    Raises:
        ValueError, TypeError: the shapes or dtypes do not fit.
    """
    arguments.require_generators(G, H)
    require_real(G=G, H=H)
    dtype = arguments.computing_dtype(G, H)
    return ScaledToeplitzSpectra.of(*_parts(G.to(dtype), H.to(dtype), f, g))


def _parts(G: Tensor, H: Tensor, f: float | Tensor, g: float | Tensor) -> tuple[Tensor, ...]:
    """The arguments of :func:`scaled_toeplitz_matmul` but x: a shift is a subdiagonal operator of ones."""
    for name, corner in (("f", f), ("g", g)):
        if isinstance(corner, complex) or (isinstance(corner, Tensor) and (corner.is_complex() or corner.ndim)):
            got = f"{tuple(corner.shape)} of {corner.dtype}" if isinstance(corner, Tensor) else corner
            raise ValueError(f"{name} must be a real number, or a tensor () of one, got {got}")
    f, g = (torch.as_tensor(corner, dtype=G.dtype, device=G.device) for corner in (f, g))
    return G, H, G.new_ones(G.shape[0] - 1), f, H.new_ones(H.shape[0] - 1), g


# The Hadamard matrix of size n is the Kronecker product of those of sizes up to this; each is one matrix
# product. Measured on a CPU: n = 1024, 64 rows: .11 ms, against .73 ms for log2(n) butterflies.
_LARGEST_HADAMARD_FACTOR = 32

# Entries of a Cauchy-like matrix that are formed at once.
_CAUCHY_ENTRIES = 2**22


@checked
def hadamard_transform(x: Tensor, normalize: bool = False) -> Tensor:
    """The Walsh-Hadamard transform H_n x in Hadamard's order, O(n log n): H_1 = [1], H_2n = [[H_n, H_n], [H_n, -H_n]].

    Args:
        x: (..., n), n a power of two.
        normalize: divide by √n, so that the transform is its own inverse.

    Returns:
        (..., n), in the dtype of x. Half precision is computed in float32.

    Raises:
        TypeError: x is no floating-point tensor.
        ValueError: n is no power of two.

    Example:
        >>> hadamard_transform(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        tensor([10., -2., -4.,  0.])
    """
    n = x.shape[-1] if x.ndim else 0
    if n < 1 or n & (n - 1):
        shape = tuple(x.shape)
        raise ValueError(f"the last dimension must be a power of two, got shape {shape}: fill it up with zeros")
    if not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"a floating-point tensor is needed, got {x.dtype}")
    rows, right = x.to(arguments.computing_dtype(x)).reshape(-1, n), 1
    while right < n:
        factor = n // right if n // right <= 64 else _LARGEST_HADAMARD_FACTOR
        H = _hadamard(factor, rows)
        # Batched products with single columns would take ten times as long as one product.
        rows = rows.reshape(-1, factor) @ H if right == 1 else H @ rows.reshape(-1, factor, right)
        right *= factor
    if normalize:
        rows = rows * n**-0.5
    return rows.reshape(x.shape).to(x.dtype)


@checked
def circulant_matmul(column: Tensor, x: Tensor, out_features: int | None = None) -> Tensor:
    """x Mᵀ for the first m rows and n columns M of the circulant matrix C_ij = column[(i - j) mod k]; O(k log k).

    Args:
        column: (k,), the first column of C.
        x: (..., n), n <= k.
        out_features: m <= k; k by default.

    Returns:
        (..., m).

    Raises:
        TypeError: an argument is complex, or holds integers.
        ValueError: m or n does not fit.

    Example:
        >>> circulant_matmul(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 0.0]), out_features=3).round()
        tensor([1., 2., 3.])
    """
    if column.ndim != 1 or column.shape[0] == 0:
        raise ValueError(f"column must be (k,) with k at least 1, got {tuple(column.shape)}")
    k = column.shape[0]
    m = k if out_features is None else out_features
    if x.ndim == 0 or not (1 <= x.shape[-1] <= k and 1 <= m <= k):
        part = f"{m} rows by {x.shape[-1] if x.ndim else 0} columns"
        raise ValueError(
            f"a circulant matrix of size {k} has no {part}: its column must be as long as the longer of both"
        )
    require_real(column=column, x=x)
    dtype, computed = arguments.promoted_dtype(column, x), arguments.computing_dtype(column, x)
    spectrum = torch.fft.rfft(column.to(computed))
    return arguments.by_rows(lambda rows: circulant_product(spectrum, rows, k)[:, :m], x, computed).to(dtype)


def circulant_product(spectrum: Tensor, x: Tensor, size: int) -> Tensor:
    """x Cᵀ, (..., size), for the circulant matrix C whose first column has that transform.

    Args:
        spectrum: (size // 2 + 1,).
        x: (..., n), n <= size; zeros follow.
        size: rows and columns of C.
    """
    # torch 2.6 has no transform of an expanded tensor, as x may be one, and the gradient of a sum. So x is copied then,
    # and dividing after the transform gives it a gradient in memory of its own.
    hat = spectrum * torch.fft.rfft(x.contiguous(), size)
    return torch.fft.irfft(hat, size, norm="forward") / size


@checked
def hankel_like_matmul(G: Tensor, H: Tensor, x: Tensor, f: float | Tensor = 1.0, g: float | Tensor = 0.0) -> Tensor:
    """x Mᵀ for M = Σ_i K(Z_f, g_i) K(Z_gᵀ, h_i)ᵀ: a Toeplitz-like product with x and H reversed, O(r n log n).

    Equation (2) of Thomas et al. with A = Z_f and B = Z_g (Table 5). A square Hankel matrix is one, of r = 2, g = 0.

    Args:
        G: (m, r).
        H: (n, r).
        x: (..., n).
        f: the corner of Z_f of size m.
        g: the corner of Z_g of size n.

    Returns:
        (..., m).

    Raises:
        ValueError, TypeError: the shapes or dtypes do not fit.

    Example:
        >>> G, H = torch.tensor([[1.0], [0.0], [0.0]]), torch.tensor([[0.0], [0.0], [1.0]])
        >>> hankel_like_matmul(G, H, torch.tensor([1.0, 2.0, 3.0])).round(decimals=4)    # M reverses the order
        tensor([3., 2., 1.])
    """
    # M J = Σ_i K(Z_f, g_i) K(Z_g, J h_i)ᵀ, J being the reversal of the order, since J Z_gᵀ J = Z_g.
    return toeplitz_like_matmul(G, H.flip(0), x.flip(-1), f, g)


@checked
def vandermonde_like_matmul(nodes: Tensor, G: Tensor, H: Tensor, x: Tensor) -> Tensor:
    """x Mᵀ for M = Σ_i K(diag(v), g_i) K(Z_0, h_i)ᵀ, v the nodes; O(m n r) and transforms for each row of x.

    The Krylov matrices have n columns, as Z_0ⁿ = 0; equation (2) of Thomas et al. with A = diag(v), B = Z_0ᵀ has no
    more than m of them, so it is the same if m >= n. Here the Vandermonde matrix v_iʲ of any m and n is M, of r = 1,
    with g = (1, ..., 1) and h = (1, 0, ..., 0). Its powers are formed: nodes above 1 may overflow.

    Args:
        nodes: v, (m,).
        G: (m, r).
        H: (n, r).
        x: (..., n).

    Returns:
        (..., m).

    Raises:
        TypeError: an argument is complex, or holds integers.
        ValueError: an argument has another shape.

    Example:
        >>> nodes, G, H = torch.tensor([1.0, 2.0]), torch.ones(2, 1), torch.tensor([[1.0], [0.0], [0.0]])
        >>> vandermonde_like_matmul(nodes, G, H, torch.tensor([0.0, 0.0, 1.0])).round(decimals=4)    # the squares
        tensor([1., 4.])
    """
    arguments.require_generators(G, H)
    arguments.require_vectors(x, H.shape[0])
    _require_nodes("nodes", nodes, G.shape[0])
    require_real(nodes=nodes, G=G, H=H, x=x)
    given, n = (nodes, G, H, x), H.shape[0]
    dtype, computed = arguments.promoted_dtype(*given), arguments.computing_dtype(*given)
    nodes, G, H = (tensor.to(computed) for tensor in given[:3])
    length = transform_length(2 * n - 1)

    def multiply(rows: Tensor) -> Tensor:
        hats = torch.fft.rfft(rows, length)[..., None, :] * torch.fft.rfft(H.mT, length).conj()
        products = torch.fft.irfft(hats, length)[..., :n] @ _powers(nodes, n).mT
        return (products * G.mT).sum(-2)

    return arguments.by_rows(multiply, x, computed).to(dtype)


def vandermonde_like_to_dense(nodes: Tensor, G: Tensor, H: Tensor) -> Tensor:
    """The matrix M (m, n) of :func:`vandermonde_like_matmul`, by three transforms of each row.

    Row a is the product of two polynomials up to the power n - 1, with the coefficients v_aʲ and (G Hᵀ)[a].
    """
    given, n = (nodes, G, H), H.shape[0]
    dtype, computed = arguments.promoted_dtype(*given), arguments.computing_dtype(*given)
    nodes, G, H = (tensor.to(computed) for tensor in given)
    length = transform_length(2 * n - 1)
    hats = torch.fft.rfft(_powers(nodes, n), length) * torch.fft.rfft(G @ H.mT, length)
    return torch.fft.irfft(hats, length)[:, :n].to(dtype)


@checked
def cauchy_like_matmul(s: Tensor, t: Tensor, G: Tensor, H: Tensor, x: Tensor, *, check_nodes: bool = True) -> Tensor:
    """x Mᵀ for the M with diag(s) M - M diag(t) = G Hᵀ, M_ij = (G Hᵀ)_ij / (s_i - t_j); O(mnr), by parts of M.

    The Cauchy-like matrices of Thomas et al., Table 5, with the displacement of equation (1).

    Args:
        s: (m,).
        t: (n,), no entry of s among them.
        G: (m, r).
        H: (n, r).
        x: (..., n).
        check_nodes: whether s and t are compared, for which a device must be waited for; False if they differ.

    Returns:
        (..., m).

    Raises:
        TypeError: an argument is complex, or holds integers.
        ValueError: s and t have a number in common, or an argument has another shape.

    Example:
        >>> s, t, G, H = torch.tensor([2.0, 3.0]), torch.tensor([0.0, 1.0]), torch.ones(2, 1), torch.ones(2, 1)
        >>> cauchy_like_matmul(s, t, G, H, torch.tensor([1.0, 0.0]))
        tensor([0.5000, 0.3333])
    """
    arguments.require_generators(G, H)
    arguments.require_vectors(x, H.shape[0])
    _require_nodes("s", s, G.shape[0])
    _require_nodes("t", t, H.shape[0])
    require_real(s=s, t=t, G=G, H=H, x=x)
    given = (s, t, G, H, x)
    dtype, computed = arguments.promoted_dtype(*given), arguments.computing_dtype(*given)
    s, t, G, H, x = (tensor.to(computed) for tensor in given)
    if check_nodes and torch.isin(s, t).any():
        common = s[torch.isin(s, t)][0].item()
        raise ValueError(f"s and t must have no number in common, both have {common}: M would be infinite there")
    height, parts = max(1, _CAUCHY_ENTRIES // H.shape[0]), []
    for some_s, some_G in zip(s.split(height), G.split(height), strict=True):
        parts.append(x @ (some_G @ H.mT / (some_s[:, None] - t)).mT)  # equation (1): (s_i - t_j) M_ij = (G Hᵀ)_ij
    return torch.cat(parts, -1).to(dtype)


def _hadamard(n: int, like: Tensor) -> Tensor:
    is_plain = type(like) is Tensor and not torch.compiler.is_compiling()  # and no fake one of a tracer
    return (_kept_hadamard if is_plain else _made_hadamard)(n, like.dtype, like.device)


def _made_hadamard(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while len(matrix) < n:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


_kept_hadamard = lru_cache(maxsize=16)(torch.inference_mode(False)(_made_hadamard))


def _powers(nodes: Tensor, count: int) -> Tensor:
    """1, v, v², ..., v^(count - 1) for each node: (m, count), by doubling."""
    powers, next_power = torch.ones_like(nodes)[:, None], nodes[:, None]
    while (known := powers.shape[1]) < count:
        powers = torch.cat([powers, powers[:, : count - known] * next_power], 1)
        next_power = next_power * next_power
    return powers


def _require_nodes(name: str, nodes: Tensor, size: int) -> None:
    if nodes.shape != (size,):
        raise ValueError(f"{name} must be ({size},), one node for each row of its generator, got {tuple(nodes.shape)}")
