"""The choice of a method for products of LDR-SD in training: when it is made, and how it is kept and saved."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_struct.functional.structured.subdiagonal import SUBDIAGONAL_METHODS

# Products between two choices; and after how many a choice is made anew although the parameters seem not to have
# changed, as those that are gathered from several processes for each product.
_PRODUCTS, _PRODUCTS_AT_ONE_VERSION = 100, 1000
# Batches are told apart by the number of binary digits of their size.
_MAGNITUDES = 64
_NONE = -1


class MethodChoices:
    """Methods by the order of magnitude of the batch, all chosen for the same operators, or nearly the same.

    They are dropped after 100 products, where the parameters change next. So between two changes of the parameters the
    same product is computed by the same method: also where activations are computed again for the backward pass.
    """

    def __init__(self) -> None:
        self._methods: dict[int, str] = {}
        self._products = 0
        self._version: int | None = None
        """That of the parameters at the last product; None: any version is another one."""
        self._is_loaded = False
        """The version at the last product is not known, but the parameters have not changed since."""

    @property
    def latest(self) -> str | None:
        """The method that was chosen last, if there is one."""
        return next(reversed(self._methods.values()), None)

    def method(
        self, batch: int, version: int | None, choose: Callable[[], str], is_refused: Callable[[str], bool]
    ) -> str:
        """The method for a product.

        Args:
            batch: rows of the input.
            version: a number that changes with the parameters; None: they may have changed.
            choose: makes the choice.
            is_refused: whether a method that was chosen earlier cannot be taken any more.
        """
        if self._is_loaded:
            self._version, self._is_loaded = version, False
        has_changed = version is None or self._version != version
        if self._products >= (_PRODUCTS if has_changed else _PRODUCTS_AT_ONE_VERSION):
            self._methods, self._products = {}, 0
        self._version = version
        self._products += 1
        magnitude = batch.bit_length()
        method = self._methods.pop(magnitude, None)
        if method is None or is_refused(method):
            method = choose()
        self._methods[magnitude] = method
        return method

    def to_tensor(self, version: int | None) -> Tensor:
        """(66,) int64: whether the parameters have changed since the last product, the products, and the methods.

        Args:
            version: that of the parameters now, or None.
        """
        methods = torch.full((_MAGNITUDES,), _NONE)
        for magnitude, method in self._methods.items():
            methods[magnitude] = SUBDIAGONAL_METHODS.index(method)
        has_changed = not self._is_loaded and (version is None or self._version != version)
        return torch.cat([torch.tensor([has_changed, self._products]), methods])

    @staticmethod
    def from_tensor(tensor: Tensor) -> MethodChoices | None:
        """The choices of :meth:`to_tensor`; also those of version 0.2: method, magnitude (-1: none), products.

        Returns:
            None where there are none to be read, as of a checkpoint that was averaged or converted to another dtype.
        """
        if tensor.dtype != torch.int64 or tensor.is_meta or tensor.shape not in ((3,), (2 + _MAGNITUDES,)):
            return None
        choices, numbers = MethodChoices(), tensor.tolist()
        if len(numbers) == 3:
            method, magnitude, choices._products = numbers
            methods = {} if magnitude < 0 else {magnitude: method}
        else:
            has_changed, choices._products, *of_magnitudes = numbers
            choices._is_loaded = not has_changed
            methods = {magnitude: method for magnitude, method in enumerate(of_magnitudes) if method != _NONE}
        if choices._products < 0 or not set(methods.values()) <= set(range(len(SUBDIAGONAL_METHODS))):
            return None
        choices._methods = {magnitude: SUBDIAGONAL_METHODS[method] for magnitude, method in methods.items()}
        return choices
