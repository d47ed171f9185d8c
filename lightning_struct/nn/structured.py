"""StructuredLinear, the base class of all structured layers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_struct.functional.checks import NotFinite, check_dense, checked, is_integer, positive_size, warn
from lightning_struct.functional.structured.prepared import PreparedMatrix, affine, prepare_dense
from lightning_struct.nn.approximation import best_factor, refine_, relative_error
from lightning_struct.nn.prepared import Form, PreparedForms, changes_unseen
from lightning_struct.nn.torch_modules import INSTEAD_OF_SCRIPTS, is_traced, recorded, whole_call

if TYPE_CHECKING:
    from typing_extensions import Self


Device = torch.device | str | None
Dtype = torch.dtype | None

_FAR = 0.5  # a relative error from which M is multiplied by the best number


def center_(factor: Tensor) -> Tensor:
    """Subtract the means over the first dimension, if there are several entries, and keep the variance; in place."""
    count = len(factor)
    return factor.sub_(factor.mean(0)).mul_(math.sqrt(count / (count - 1))) if count > 1 else factor


class StructuredLinear(nn.Module):
    """y = M x + b, where M (out_features, in_features) has few parameters. It takes the place of ``nn.Linear``.

    Inputs are (..., in_features) with any number of leading dimensions, or none. Under autocast the product is computed
    in the dtype of the parameters (there is no FFT in half precision), and the output has the dtype of autocast, as
    with ``nn.Linear``.

    In eval mode, without gradients to the parameters, the layer prepares whatever depends on the parameters alone once
    for many calls: the dense matrix (at most 64 MiB in float32), or spectra or factors, whichever multiplies faster, or
    both for batches of different sizes. LDR-TD, Vandermonde-like, Cauchy-like and pruned layers always prepare the
    dense matrix, of any size. The prepared forms are made anew when a parameter has changed, and dropped by
    ``train()``, ``eval()``, ``to()`` and each product with gradients to the parameters. A layer that was made in
    inference mode, or whose parameters are shared with other processes, prepares nothing. A change through
    ``parameter.data`` in eval mode goes unnoticed until the next ``eval()``.

    A class derived from this one names its parameters in ``weight_names``, and defines ``_draw_weights`` and
    ``_multiply``; ``_prepare_factors`` (then in place of ``_multiply``, unless that differs) and ``_prepares_dense`` if
    there is something better to prepare than the dense matrix; and ``_dense`` and ``_makes_matrix`` if making that
    matrix first can be faster than multiplying many rows.

    Args:
        in_features: n, at least 1.
        out_features: m, at least 1.
        bias: add a trained vector, zero at the start.
        device: of the parameters.
        dtype: of the parameters (None: torch's default).

    Attributes:
        approximation_error: ‖M - W‖ / ‖W‖ in the Frobenius norm if the layer was made from a weight W, else None.

    Raises:
        ValueError: a size is not positive.

    Example:
        >>> from lightning_struct.nn import ToeplitzLike
        >>> layer = ToeplitzLike(64, 32, rank=2)
        >>> layer(torch.randn(5, 3, 64)).shape, layer.to_dense().shape
        (torch.Size([5, 3, 32]), torch.Size([32, 64]))
        >>> layer.weight_parameters, round(layer.compression_ratio, 2)
        (192, 10.67)
    """

    weight_names: ClassVar[tuple[str, ...]] = ()
    """The parameters of M, a factor of it first; those that an instance does without are None."""
    _places: ClassVar[tuple[str, ...]] = ()
    """Buffers of distinct integers, such as the order of a permutation; an instance may do without."""
    _is_of_matmuls: ClassVar[bool] = False
    """Whether the product consists of matrix products, which autocast knows how to run."""

    gain: float = 1.0
    """The number by which :meth:`reset_parameters` multiplies M."""

    bias: nn.Parameter | None
    _prepared: PreparedForms | None = None

    @checked
    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Device = None, dtype: Dtype = None
    ) -> None:
        super().__init__()
        self.in_features = positive_size("in_features", in_features)
        self.out_features = positive_size("out_features", out_features)
        if dtype is not None and not (dtype.is_floating_point and dtype.itemsize > 1):
            raise TypeError(f"{type(self).__name__} computes with real floating-point numbers, but dtype is {dtype}")
        self.register_parameter("bias", None)
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype))
        self.approximation_error: float | None = None

    @classmethod
    @torch.inference_mode(False)
    def from_linear(cls, linear: nn.Linear, *arguments: Any, refine: int | None = None, **options: Any) -> Self:
        """The member of the class that is nearest to a trained layer's weight W in the Frobenius norm, approximately.

        The search starts from the projection on the class if there is one in closed form (low rank, Monarch, circulant,
        pruned), and from the truncated singular value decomposition of the displacement for the classes of low
        displacement rank. From there L-BFGS lowers ‖M - W‖ over all parameters, in float64. If the result is still far
        from W, it is multiplied by the best scalar, so that M is never further from W than zero is. The same W gives
        the same layer.

        Args:
            linear: has ``weight`` (out_features, in_features) and ``bias`` or None, which is copied.
            *arguments, **options: of the class, such as ``rank``.
            refine: most iterations of L-BFGS; 0 leaves the start as it is. None: 200 up to 1,024 x 1,024, fewer for
                larger matrices, and still fewer for slower classes.

        Returns:
            A layer with ``approximation_error``, on the device, in the dtype and in the mode of ``linear``.

        Raises:
            TypeError: ``linear`` is no layer with a weight, or W is complex, sparse or quantised.
            ValueError: W has NaN or infinite entries, or none, on the meta device; or it is no matrix; or ``refine`` is
                negative.

        Example:
            >>> linear = nn.Linear(8, 8, bias=False)
            >>> _ = nn.init.eye_(linear.weight)
            >>> from lightning_struct.nn import Circulant
            >>> Circulant.from_linear(linear).approximation_error
            0.0
        """
        if refine is not None and (not is_integer(refine) or refine < 0):
            raise ValueError(f"refine must be an integer that is not negative, or None, but is {refine!r}")
        name = cls.__name__
        if not isinstance(linear, nn.Module) or not isinstance(getattr(linear, "weight", None), Tensor):
            raise TypeError(f"{name}.from_linear takes an nn.Linear, but linear is {linear!r:.80}")
        weight = linear.weight.detach()
        check_dense(f"the weight of {linear}", weight)
        if weight.is_complex():
            raise TypeError(f"the weight of {linear} is complex: {name}.from_linear takes real ones")
        if weight.dim() != 2:
            raise ValueError(
                f"the weight of {linear} has shape {tuple(weight.shape)}: {name}.from_linear takes nn.Linear; "
                "replace_linear takes 1 x 1 convolutions, and compress larger ones"
            )
        if weight.is_meta:
            raise ValueError(
                f"the weight of {linear} is on the meta device, where it has no values: load the weights before "
                f"{name}.from_linear (to_empty, then load_state_dict), or take {name} itself, which draws weights"
            )
        if not bool(weight.isfinite().all()):
            raise ValueError(f"the weight of {linear} has NaN or infinite entries: no {name} is near to it")
        options |= {"bias": linear.bias is not None, "dtype": torch.float64}
        target = weight.to(torch.float64, copy=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layer = cls(linear.in_features, linear.out_features, *arguments, **options).to(weight.device)
            with torch.no_grad():
                layer._start_near(target)
        if relative_error(layer.to_dense(), target) > 8 * torch.finfo(weight.dtype).eps:
            layer._refine(target, layer._refinement() if refine is None else refine)
        layer.to(weight.dtype)
        M = layer.to_dense().detach().double()
        layer.approximation_error = relative_error(M, target)
        if layer.approximation_error > _FAR or not target.any():
            layer.scale_(best_factor(M, target))
            layer.approximation_error = relative_error(layer.to_dense().double(), target)
        if layer.bias is not None:
            with torch.no_grad():
                layer.bias.copy_(linear.bias)
        return layer.train(linear.training)

    @property
    def weight_parameters(self) -> int:
        """The number of trained numbers that M is made of, the bias aside."""
        return sum(tensor.numel() for tensor in self._weights().values())

    @property
    def compression_ratio(self) -> float:
        """Entries of M for each of its parameters: ``nn.Linear`` has 1 (Thomas et al., section 5.1)."""
        return self.in_features * self.out_features / self.weight_parameters

    @property
    def weight(self) -> Tensor:
        """M, (out_features, in_features), computed at each access: for code that reads the weight of a layer."""
        return self.to_dense().contiguous()

    def to_dense(self) -> Tensor:
        """M, (out_features, in_features), with gradients to the parameters, and in their dtype, also under autocast."""
        reference = self._reference
        if reference.is_meta or not torch.is_autocast_enabled(reference.device.type):
            return self._dense()
        with torch.autocast(reference.device.type, enabled=False):
            return self._dense()

    def forward(self, input: Tensor) -> Tensor:
        """(..., out_features) for an input (..., in_features).

        Raises:
            TypeError: the input has not the dtype of the parameters.
            ValueError: the last dimension of the input is not ``in_features``.
        """
        if is_traced(input):
            return whole_call(self, input)
        check_dense("the input of a structured layer", input)
        if input.is_meta and not self._reference.is_meta:
            raise TypeError("the input is on the meta device, without numbers, and the layer is not")
        if not torch.compiler.is_compiling() and self._prepared is not None:
            matrix = self._prepared_for(self._prepared, input)
            if matrix is not None:
                own = self._parameters  # looking the bias up there takes a quarter of the time
                return affine(matrix, input, own["bias"] if "bias" in own else self.bias)  # noqa: SIM401
        dtype, device = self._reference.dtype, input.device.type
        if input.shape[-1:] != (self.in_features,):
            taken, got = f"(..., {self.in_features})", tuple(input.shape)
            raise ValueError(f"{type(self).__name__} takes inputs {taken}, but the input has shape {got}")
        is_autocast = not input.is_meta and torch.is_autocast_enabled(device)
        if is_autocast and input.is_floating_point() and dtype == torch.float32:
            if self._is_of_matmuls:
                return self._add_bias(self._product(input))
            with torch.autocast(device, enabled=False):
                y = self._add_bias(self._matmul(input.to(dtype)))
            return y.to(torch.get_autocast_dtype(device))
        if input.dtype != dtype:
            name = type(self).__name__
            raise TypeError(
                f"the input of {name} has dtype {input.dtype}, its parameters have {dtype}: convert one of them"
            )
        return self._add_bias(self._matmul(input))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new weights, with M multiplied by ``gain``, and set the bias to zero."""
        self._draw_weights()
        if self.gain != 1:
            self.scale_(self.gain)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @torch.no_grad()
    def scale_(self, factor: float) -> Self:
        """Multiply M by a number, in place."""
        self._reference.mul_(factor)
        return self

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name in ("weight", "weight_orig"):  # torch.nn.utils.prune makes the second one from the first
            raise ValueError(
                f"{type(self).__name__} has no parameter 'weight' that could be pruned, set, or tied to another "
                f"module's: its matrix is made of {', '.join(self._weights())}. Prune one of these, or take "
                "PrunedLinear; exclude leaves out tied layers"
            )
        super().register_parameter(name, param)

    def train(self, mode: bool = True) -> Self:
        self._prepared = None
        return super().train(mode)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        # Torch does not say whether it is strict, and then raises an error: so this is a warning.
        if prefix + "weight" in state_dict and not any(prefix + name in state_dict for name in self.weight_names):
            warn(
                f"a {type(self).__name__} stays with the weights it has, because those of a dense layer were saved: "
                "load these into the model before replace_linear, and take the from_linear of a class to begin near to "
                "them"
            )

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._prepared = None
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prepared": None}

    def __prepare_scriptable__(self) -> NoReturn:
        raise RuntimeError(f"torch.jit.script cannot compile {self}: {INSTEAD_OF_SCRIPTS}")

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}"

    def _draw_weights(self) -> None:
        """Draw new weights of M, such that the variance of the input is kept. Without gradients."""
        raise NotImplementedError

    def _dense(self) -> Tensor:
        """M, (out_features, in_features), without autocast."""
        identity = torch.eye(self.in_features, device=self._reference.device, dtype=self._reference.dtype)
        return self._multiply(identity).T

    def _multiply(self, x: Tensor) -> Tensor:
        """x Mᵀ, with gradients to x and the parameters."""
        return self._prepare_factors().matmul(x)

    def _prepare_factors(self) -> PreparedMatrix:
        """M by few numbers, such as factors or spectra; with gradients if these are asked for."""
        raise NotImplementedError

    def _prepares_dense(self, rows: int) -> bool:
        """Whether the dense matrix is prepared in eval mode for products with so many rows."""
        return True

    def _prepare(self, dense: bool) -> Form:
        """M in the form that ``_prepares_dense`` named, for products in eval mode; no gradients, finite parameters."""
        return prepare_dense(self.to_dense()) if dense else self._prepare_factors()

    def _start_near(self, weight: Tensor) -> None:
        """Set the parameters to the start of the search for the member nearest to ``weight``. Without gradients."""

    def _refine(self, weight: Tensor, iterations: int) -> None:
        """Lower ‖M - ``weight``‖ by that many iterations at most."""
        weights = [tensor for tensor in self._weights().values() if tensor.requires_grad]
        refine_(weights, self.to_dense, weight, iterations)

    def _refinement(self) -> int:
        """The default iterations of ``from_linear``: 200 up to 1,024 x 1,024, then as many as in that time."""
        # An iteration takes longer in proportion to the entries, and some more where these leave the cache.
        return int(200 * min(1.0, 1024**2 / (self.in_features * self.out_features)) ** 1.25)

    def _weights(self) -> dict[str, Tensor]:
        named = {name: getattr(self, name) for name in self.weight_names}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def _reference(self) -> Tensor:
        """The first parameter, which has the device and the dtype of all."""
        return getattr(self, self.weight_names[0])

    def _add_bias(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _matmul(self, x: Tensor) -> Tensor:
        if torch.jit.is_tracing():
            return recorded(self, lambda: self._multiply(x))
        if x.numel() == 0:  # torch 2.6 has no Fourier transform of no rows
            return F.linear(x, self.to_dense())
        if self.training or torch.compiler.is_compiling():
            return self._product(x)
        weights = self._weights()
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights.values()):
            self._prepared = None  # the next call may be a step of an optimizer that leaves no trace
            return self._product(x)
        rows = x.shape[:-1].numel()
        prepared = self._prepared  # another thread may drop it meanwhile
        if prepared is None or not prepared.are_current(self._parameters, self._buffers):
            # Under torch.func and in functional_call the weights are no Parameters of this module.
            if not all(isinstance(weight, nn.Parameter) for weight in weights.values()):
                return self._product(x)
            sources = weights | {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
            if any(changes_unseen(source) for source in sources.values()):
                return self._product(x)
            self.check_values()
            prepared = self._prepared = PreparedForms(self._reference, sources)
        return affine(prepared.matrix(rows, self._prepares_dense, self._prepare), x, None)

    def _product(self, x: Tensor) -> Tensor:
        """x Mᵀ, with gradients to x and the parameters, by M itself where making it for so many rows is faster."""
        if not torch.compiler.is_compiling() and self._makes_matrix(x.shape[:-1].numel()):
            return F.linear(x, self.to_dense())
        return self._multiply(x)

    def _makes_matrix(self, rows: int) -> bool:
        """Whether making M is faster than multiplying so many rows without it. A compiler does not ask."""
        return False

    def _prepared_for(self, prepared: PreparedForms, x: Tensor) -> Form | None:
        """The matrix for products with as many rows as x, if it is prepared and can be used as it is."""
        if torch.jit.is_tracing():
            return None
        is_usual = not self.training and x.dtype == prepared.dtype and x.device == prepared.device and x.numel() > 0
        if not is_usual or x.ndim == 0 or x.shape[-1] != self.in_features:
            return None
        if torch.is_autocast_enabled(prepared.device_type):
            return None
        if not prepared.are_current(self._parameters, self._buffers):
            return None
        return prepared.found(x.numel() // self.in_features)

    def check_values(self) -> None:
        """Refuse parameters of M that have NaN or infinite entries, and places that are no longer distinct.

        Raises:
            ValueError: a parameter or a buffer is so; it is named.
        """
        for name, tensor in self._weights().items():
            if tensor.is_meta:
                raise ValueError(f"parameter {name!r} of {self} is on the meta device: load the weights first")
            if not bool(tensor.detach().isfinite().all()):  # detached: nothing is saved for a backward pass
                raise NotFinite(
                    f"parameter {name!r} of {self} has NaN or infinite entries: training has diverged (lower the "
                    "learning rate, or clip gradients), or a checkpoint is damaged"
                )

        for name in self._places:
            places = getattr(self, name)
            if places is not None and len(places.unique()) < places.numel():
                raise ValueError(
                    f"buffer {name!r} of {self} no longer holds distinct places: an average of weights that includes "
                    "the buffers rounds integers down. Leave them out (EMAWeightAveraging(use_buffers=False), "
                    "AveragedModel(..., use_buffers=False)); averages and checkpoints so far have a wrong matrix"
                )
