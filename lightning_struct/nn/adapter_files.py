"""Adapters in files: their weights, and a description from which they are made anew beside the same base."""

import copy
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.functional.checks import checked
from lightning_struct.functional.layers.registry import plain_name
from lightning_struct.functional.torch_tools import damaged_part
from lightning_struct.nn.adapters import (
    adapter_state_dict,
    add_adapters,
    frozen_parameter_names,
    has_adapters,
    load_adapter_state_dict,
    require_adapters,
    train_whole,
    updated_projections,
)
from lightning_struct.nn.layer_structure import layer_factory, structure_entry
from lightning_struct.nn.selection import Model
from lightning_struct.nn.torch_modules import is_sharded, whole
from lightning_struct.nn.updates import AdaptedLinear, StructuredUpdate

_FORMAT = 1
_TOLERANCE = 1e-4  # of norms: the same weights in another precision or summed on another device pass
_ROUNDING = 2.0**-8  # of an entry to bfloat16, relative; in the norm of many of them it averages out
IN_CHECKPOINTS = "adapter_description"
"""The key of the description in a checkpoint of AdapterCheckpoint."""
_DESCRIPTION, _SAFE, _PICKLED = "adapters.json", "adapters.safetensors", "adapters.pt"


@checked
def save_adapters(model: nn.Module, folder: str | Path) -> None:
    """Save the active adapter of a model to a folder, with all that :func:`load_adapters` needs but the base.

    Args:
        model: after :func:`~lightning_struct.nn.add_adapters`.
        folder: made if it is not there. It gets ``adapters.json`` (class, arguments, scale and sizes of each adapter),
            and the weights that :func:`~lightning_struct.nn.adapter_state_dict` returns, as ``adapters.safetensors`` if
            safetensors is installed, else as ``adapters.pt``. If FSDP2 shards the model, all processes call this, and
            the first one writes.

    Raises:
        ValueError: the model has no adapters, or they hold NaN.
        TypeError: the class of an adapter has an argument that the adapter does not know any more.

    Example:
        >>> import tempfile
        >>> from lightning_struct.nn import LowRank, add_adapters
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_adapters(add_adapters(nn.Linear(8, 8), LowRank), folder)
        ...     "adapters.json" in [file.name for file in Path(folder).iterdir()]
        True
    """
    if meta := [name for name, value in model.named_parameters() if value.is_meta]:
        raise ValueError(f"{meta[0]} is on the meta device, without numbers: load the weights first")
    described = description_of(model)
    frozen, named = frozen_parameter_names(model), model.named_parameters(remove_duplicate=False)
    described["base_norms"] = norms_of({plain_name(name): p for name, p in named if plain_name(name) in frozen})
    folder = Path(folder)
    of_folder = names_in_folder(model)
    if not described["layers"]:
        raise ValueError(f"no adapter of {type(model).__name__} is active: save it outside of disable_adapters")
    state = {name: value for name, value in adapter_state_dict(model).items() if name in of_folder}
    weights = {of_folder[name]: whole(value.detach()).cpu().contiguous() for name, value in state.items()}
    if wrong := [name for name, value in weights.items() if not value.isfinite().all()]:
        raise ValueError(f"the adapters hold NaN or infinity in {', '.join(wrong[:3])}, and are not saved")
    sharded = any(map(is_sharded, state.values()))
    if not sharded or torch.distributed.get_rank() == 0:
        _write(folder, described, weights)
    if sharded:
        torch.distributed.barrier()


def _write(folder: Path, described: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in (_SAFE, _PICKLED):  # of an earlier call, perhaps in the other format
        (folder / file).unlink(missing_ok=True)
    written = folder / (_SAFE if find_spec("safetensors") else _PICKLED)
    if written.name == _SAFE:
        import_module("safetensors.torch").save_file({name: value.clone() for name, value in weights.items()}, written)
    else:
        torch.save(weights, written)
    described = {**described, "checksum": _checksum(described, written)}
    (folder / _DESCRIPTION).write_text(json.dumps(described, indent=1))


def _checksum(described: Mapping[str, Any], file: Path) -> str:
    """SHA-256 of the description and of the file of the weights."""
    return sha256(json.dumps(described).encode() + file.read_bytes()).hexdigest()


def description_of(model: nn.Module) -> dict[str, Any]:
    """Class, arguments, scale and sizes of each active update, and the names of other trained weights, as plain data.

    Raises:
        ValueError, TypeError: as :func:`save_adapters`.
    """
    require_adapters(model)
    layers = {}
    for name, update in _named_updates(model):
        if not update.is_enabled:
            continue
        options = {
            "scale": update.given_scale,
            "dropout": update.dropout,
            "learned_diagonals": update.learned_diagonals,
        }
        size = [update.adapter.out_features, update.adapter.in_features]
        layers[name] = {**(structure_entry(update.adapter) or {}), "options": options, "size": size}
    of_adapters = {parameter for _, update in _named_updates(model) for parameter in update.parameters()}
    trained = [plain_name(n) for n, p in model.named_parameters() if p.requires_grad and p not in of_adapters]
    return {"format": _FORMAT, "layers": layers, "trained": trained}


def norms_of(weights: Mapping[str, Tensor]) -> dict[str, float]:
    """The norm of each weight, but of quantised ones. They come from a device together, so there is one wait for it."""
    norms: dict[str, Tensor] = {}
    for name, weight in weights.items():
        with suppress(NotImplementedError, RuntimeError):  # of integers, and of tensors that are quantised
            norms[name] = whole(torch.linalg.vector_norm(weight.detach(), dtype=torch.float64))
    device = next((norm.device for norm in norms.values()), None)
    together = torch.stack([norm.to(device) for norm in norms.values()]).tolist() if norms else []
    return dict(zip(norms, together, strict=True))


def check_base(weights: Mapping[str, Tensor], norms: Mapping[str, float]) -> None:
    """Compare the weights of a base with the norms that they had beside its adapters.

    Raises:
        ValueError: one differs by more than rounding, also to half precision.
    """
    for name, norm in norms_of({name: weight for name, weight in weights.items() if name in norms}).items():
        tolerance = max(_TOLERANCE, 8 * _ROUNDING / math.sqrt(weights[name].numel() or 1))
        if not abs(norm - norms[name]) <= tolerance * norms[name]:  # nor if it is NaN
            raise ValueError(
                f"the adapters were trained beside another base: {name} has norm {norm:.6g} and had {norms[name]:.6g}. "
                "Load the weights of that base before the adapters are added"
            )


@checked
def load_adapters(model: Model, folder: str | Path, name: str = "default") -> Model:
    """Add the adapter of a folder to a model, with its weights.

    Args:
        model: the base, as it was when :func:`~lightning_struct.nn.add_adapters` was called; it may have adapters of
            other names. It is changed in place.
        folder: written by :func:`save_adapters`; or a checkpoint of :class:`~lightning_struct.AdapterCheckpoint`. The
            model may be a part of the one that was saved, such as the network of a LightningModule.
        name: of the adapter in the model, see :func:`~lightning_struct.nn.set_adapter`.

    Returns:
        ``model``; the new layer if it is a linear layer itself.

    Raises:
        FileNotFoundError: the folder has no adapters.
        ValueError: the model has an adapter of that name, other weights, or not the layers that the files are for; the
            files hold NaN, are of another version, or have trained weights or buffers beside the adapter, for a model
            whose other adapters were trained beside others. The model then stays as it was.

    Example:
        >>> import tempfile
        >>> from lightning_struct.nn import LowRank, add_adapters
        >>> base = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        >>> trained = add_adapters(copy.deepcopy(base), LowRank)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_adapters(trained, folder)
        ...     other = load_adapters(base, folder)
        >>> torch.equal(other[0].update.adapter.H, trained[0].update.adapter.H)
        True
    """
    before = adapter_state_dict(model) if has_adapters(model) else {}
    if any(update.name == name for _, update in _named_updates(model)):
        raise ValueError(f"{type(model).__name__} has an adapter {name!r} already: give another name, or the base")
    try:
        described, loaded = _tried(model, Path(folder), name, before)
    except (FileNotFoundError, ValueError):
        raise
    except Exception as error:  # of json, pickle or safetensors, or an entry that is not there
        raise ValueError(f"{folder} is damaged ({type(error).__name__}: {error}): save the adapters again") from error
    return load_adapter_state_dict(_with_adapters(model, described, Path(folder), name), {**before, **loaded})


def _tried(
    model: nn.Module, folder: Path, name: str, before: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description in a folder and its weights by the names of a model, which fit a copy of the model.

    Raises:
        ValueError: they do not. Other errors: a file is damaged.
    """
    described, weights = _below(model, *_read(folder), folder)
    if wrong := [name for name, value in weights.items() if not value.isfinite().all()]:
        raise ValueError(f"the adapters in {folder} hold NaN or infinity in {', '.join(wrong[:3])}")
    memo: dict[int, Any] = {id(t): t.detach() for t in model.buffers()}  # a copy that shares the memory
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
    trial = _with_adapters(copy.deepcopy(model, memo), described, folder, name)
    for layer, update in [(layer, update) for layer, update in _named_updates(trial) if update.is_enabled]:
        size, given = [update.adapter.out_features, update.adapter.in_features], described["layers"][layer]["size"]
        if size != given:
            raise ValueError(f"the adapter of {layer} in {folder} is for a weight {given}, this model has {size}")
    shared = {plain_name(n): value for n, value in model.state_dict().items()} if before else {}  # with other adapters
    names, state = {of_folder: own for own, of_folder in names_in_folder(trial).items()}, adapter_state_dict(trial)
    for of_folder in sorted(names.keys() | weights.keys()):
        value = state.get(names.get(of_folder, ""))
        there, given = (None if v is None else [*v.shape] for v in (value, weights.get(of_folder)))
        if there != given:
            shapes = f"has the shape {given}, for this model it is {there}"
            raise ValueError(f"{of_folder} of the adapters in {folder} {shapes}")
        now = shared.get(names[of_folder])
        if now is not None and not torch.equal(weights[of_folder].to(now), now):
            raise ValueError(f"{of_folder} in {folder} is not that of the model, which its other adapters need")
    check_base({plain_name(name): p for name, p in trial.named_parameters()}, described.get("base_norms", {}))
    return described, {names[of_folder]: value for of_folder, value in weights.items()}


def _read(source: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the weights of a folder, or of a checkpoint."""
    file = source / _DESCRIPTION
    if source.is_file():
        if (part := damaged_part(source)) is not None:
            raise ValueError(f"{source} is damaged ({part}): give another checkpoint, or a copy of it")
        checkpoint = torch.load(source, map_location="cpu", weights_only=True)
        if not isinstance(checkpoint, Mapping) or IN_CHECKPOINTS not in checkpoint:
            raise ValueError(f"{source} has no adapters: give a folder of save_adapters or a file of AdapterCheckpoint")
        described = checkpoint[IN_CHECKPOINTS]
        names = described["names"]
        weights = {plain_name(name): value for name, value in checkpoint["state_dict"].items()}
        weights = {names[name]: value for name, value in weights.items() if name in names}
    elif not file.is_file():
        raise FileNotFoundError(f"{source} has no {_DESCRIPTION}: give the folder that save_adapters has written")
    else:
        try:
            described = dict(json.loads(file.read_text()))
        except ValueError as error:
            raise ValueError(f"{file} cannot be read: {error}") from error
        weights = {}
    if described.get("format") != _FORMAT:
        raise ValueError(f"{source} has format {described.get('format')}, this version reads {_FORMAT}")
    return described, weights or _weights(source, described)


def _weights(folder: Path, described: dict[str, Any]) -> dict[str, Tensor]:
    file = next((folder / name for name in (_SAFE, _PICKLED) if (folder / name).is_file()), None)
    if file is None:
        raise FileNotFoundError(f"{folder} has neither {_SAFE} nor {_PICKLED}: copy all files of the adapters")
    written = described.pop("checksum", None)  # version 0.3 has none
    if written not in (None, _checksum(described, file)):
        raise ValueError(
            f"{folder} is damaged: its files are not as save_adapters wrote them. Take another copy; if {_DESCRIPTION} "
            'was edited, take its "checksum" out'
        )
    if file.name == _SAFE:
        return import_module("safetensors.torch").load_file(file)
    return torch.load(file, weights_only=True)


def _below(
    model: nn.Module, described: dict[str, Any], weights: dict[str, Tensor], source: Path
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The same by the names of the model, if it is the part of the one that was saved that has all adapters."""
    modules, first = dict(model.named_modules()), next(iter(described["layers"]), "").split(".")

    def is_here(name: str) -> bool:
        return name in modules or isinstance(modules.get(name.rpartition(".")[0]), nn.MultiheadAttention)

    cut = next((cut for cut in range(len(first)) if is_here(".".join(first[cut:]))), 0)
    prefix = "".join(f"{part}." for part in first[:cut])
    if not all(name.startswith(prefix) for name in described["layers"]):
        return described, weights
    if other := [name for name in described["trained"] if not name.startswith(prefix)]:
        raise ValueError(f"beside the adapters {source} has {other[0]}, which is outside of {type(model).__name__}")

    def ours(of: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix(prefix): value for name, value in of.items() if name.startswith(prefix)}

    trained = [name.removeprefix(prefix) for name in described["trained"]]
    parts = {"layers": ours(described["layers"]), "base_norms": ours(described.get("base_norms", {}))}
    return {**described, **parts, "trained": trained}, ours(weights)


def _with_adapters(model: Model, described: Mapping[str, Any], folder: Path, adapter: str) -> Model:
    result: Any = model
    for name, entry in described["layers"].items():
        arguments = {key: value for key, value in entry.items() if key not in ("options", "size")}
        try:
            options = {**entry["options"], "name": adapter}
            result = add_adapters(result, layer_factory(arguments), include=name or None, **options)
        except ValueError as error:
            raise ValueError(f"the adapters in {folder} do not fit {type(model).__name__}: {error}") from error
    named = {plain_name(name): parameter for name, parameter in result.named_parameters(remove_duplicate=False)}
    if missing := [name for name in described["trained"] if name not in named]:
        raise ValueError(f"the adapters in {folder} train {missing[0]}, which {type(model).__name__} has not")
    train_whole(result, [named[name] for name in described["trained"]])
    return result


def _named_updates(model: nn.Module) -> list[tuple[str, StructuredUpdate]]:
    """The name by which add_adapters selects each layer, with its updates."""
    found = []
    for name, module in model.named_modules():
        name = plain_name(name)
        if isinstance(module, AdaptedLinear):
            found += [(name, update) for update in module.updates]
        elif isinstance(module, nn.MultiheadAttention):
            found += [(f"{name}.{part}" if name else part, update) for part, update in updated_projections(module)]
    return found


def names_in_folder(model: nn.Module) -> dict[str, str]:
    """The names that a folder has for the state of the active adapter, and of parameters that are trained beside it.

    They are those of a model that has no other adapter.
    """
    names = {name: name for name in adapter_state_dict(model)}
    for path, update in model.named_modules():
        if isinstance(update, StructuredUpdate):
            path = f"{plain_name(path)}."
            alone = f"{path[:-1].removesuffix(f'_{update.name}')}."
            for name in [name for name in names if name.startswith(path)]:
                del names[name]
                if update.is_enabled:
                    names[name] = alone + name.removeprefix(path)
    return names
