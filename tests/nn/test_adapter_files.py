"""Adapters in a folder: what is written is what is read, beside the same base and no other."""

import copy
import json
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_struct.nn import (
    LDRSubdiagonal,
    LowRank,
    RandomizedHadamard,
    add_adapters,
    delete_adapter,
    disable_adapters,
    load_adapters,
    merge_adapters,
    merged_adapters,
    replacement_report,
    save_adapters,
    set_adapter,
    unload_adapters,
)
from lightning_struct.nn.updates import StructuredUpdate
from tests.nn.layers import Conv1D
from tests.processes import in_two_processes


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.up, self.head = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        x = self.attention(x, x, x, need_weights=False)[0].mean(1)
        return self.head(torch.relu(self.up(self.norm(x))))


@pytest.fixture
def base():
    torch.manual_seed(0)
    return Network()


@pytest.fixture
def trained(base):
    """The base with adapters of three kinds, all of whose parameters have moved."""
    model = copy.deepcopy(base)
    add_adapters(model, partial(LowRank, rank=2), include="up", train=["head", "*.bias"], scale=2.0, dropout=0.25)
    add_adapters(model, LDRSubdiagonal, include="attention.q_proj", learned_diagonals="outputs")
    add_adapters(model, RandomizedHadamard, include="attention.out_proj")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.norm.running_mean.fill_(0.3)
    return model


X = torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(1))
FORMATS = ["adapters.pt", *(["adapters.safetensors"] if find_spec("safetensors") else [])]


@pytest.mark.parametrize("file", FORMATS)
def test_a_base_with_the_adapters_of_a_folder_computes_the_same(base, trained, file, tmp_path, monkeypatch):
    if file == "adapters.pt":
        monkeypatch.setattr("lightning_struct.nn.adapter_files.find_spec", lambda name: None)
    save_adapters(trained, tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder" / file).is_file()
    loaded = load_adapters(base, tmp_path / "new" / "folder")
    assert loaded is base
    assert torch.equal(loaded.eval()(X), trained.eval()(X))
    for name, parameter in trained.named_parameters():
        assert loaded.get_parameter(name).requires_grad == parameter.requires_grad, name
    assert loaded.up.update.dropout == 0.25


def test_disabled_adapters_leave_the_base_for_a_while(base, trained):
    trained.norm.running_mean.zero_()
    before = trained.eval()(X)
    with pytest.raises(RuntimeError, match="inside"), disable_adapters(trained):
        torch.testing.assert_close(trained(X), base.eval()(X))
        raise RuntimeError("inside")
    assert torch.equal(trained(X), before)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.up, self.norm = nn.Embedding(9, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.recurrent, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 9)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.norm(self.recurrent(self.up(self.embedding(x)))[0]))


@pytest.mark.parametrize("loaded", [False, True])
def test_trained_weights_are_those_of_the_base_while_adapters_are_disabled(loaded, tmp_path):
    torch.manual_seed(0)
    base, x = Tied().double(), torch.arange(6).view(2, 3)
    model = add_adapters(copy.deepcopy(base), LowRank, include="up", train=["head", "recurrent", nn.LayerNorm])
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(torch.randn_like(parameter))
    names = [*model.state_dict()]
    if loaded:
        save_adapters(model, tmp_path)
        model = load_adapters(copy.deepcopy(base), tmp_path)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    add_adapters(model, LowRank, include="up", train="head", name="second")  # keeps what it had
    set_adapter(model, "default")
    loss = model(x).sum()
    with disable_adapters(model):
        torch.testing.assert_close(model(x), base(x))
    loss.backward()  # the weights were not changed in place
    assert all(dict(model.named_parameters())[name] is p and p.grad is not None for name, p in trained.items())
    expected = model(x)
    merged = merge_adapters(copy.deepcopy(model))
    torch.testing.assert_close(merged(x), expected)
    assert [*merged.state_dict()] == [*base.state_dict()] and {*names} <= {*model.state_dict()}


@pytest.mark.parametrize("deleted", ["first", "second", "third"])
def test_a_deleted_adapter_leaves_the_others_and_an_unloaded_model_is_the_base(base, deleted, tmp_path):
    model, names = copy.deepcopy(base).eval(), ["first", "second", "third"]
    for name in names:
        add_adapters(
            model, partial(LowRank, rank=2), name=name, include=["up", "attention.q_proj", "attention.out_proj"]
        )
    add_adapters(model, LowRank, include=["head", "attention.v_proj"], name=deleted)
    for update in [module for module in model.modules() if isinstance(module, StructuredUpdate)]:
        nn.init.normal_(update.adapter.G)
    expected = {}
    for name in names:
        set_adapter(model, name)
        expected[name] = model(X)
    set_adapter(model, "second")
    delete_adapter(model, deleted)
    rest = [name for name in names if name != deleted]
    torch.testing.assert_close(model(X), expected["second" if "second" in rest else "first"])
    assert type(model.head) is nn.Linear
    for name in rest:
        set_adapter(model, name)
        torch.testing.assert_close(model(X), expected[name])
        save_adapters(model, tmp_path / name)
        torch.testing.assert_close(load_adapters(copy.deepcopy(base), tmp_path / name).eval()(X), expected[name])
    delete_adapter(model, rest[0])
    torch.testing.assert_close(model(X), expected[rest[1]])
    with pytest.raises(ValueError, match=f"no adapter but '{rest[1]}' is there: unload_adapters removes it"):
        delete_adapter(model, rest[1])
    assert " parameters are trained (" in replacement_report(model)
    state, before = unload_adapters(model).state_dict(), base.state_dict()
    assert state.keys() == before.keys() and all(torch.equal(value, before[name]) for name, value in state.items())


def test_unloaded_weights_that_were_trained_are_those_of_the_base(base, trained):
    assert all(torch.equal(p, base.get_parameter(name)) for name, p in unload_adapters(trained).named_parameters())


class Int8(torch.Tensor):
    """A quantised tensor as torchao has it: it knows the product, and hardly more."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values):
        self.values = values

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            x, weight, bias = args
            return func(x, weight.values / 100, bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values)
        raise NotImplementedError(str(func))


class Int8Linear(nn.Linear):
    """As bitsandbytes has it."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.weight = nn.Parameter((self.weight * 100).char(), requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.weight / 100, self.bias)


def quantised(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    if kind == "torchao":
        model[0].weight = nn.Parameter(Int8((model[0].weight.detach() * 100).char()), requires_grad=False)
    else:
        model[0] = Int8Linear(8, 8)
    return model


@pytest.mark.parametrize("kind", ["torchao", "bitsandbytes"])
def test_adapters_of_a_quantised_base_are_saved_loaded_and_disabled_but_not_merged(kind, tmp_path):
    base, x = quantised(kind), torch.randn(3, 8)
    before, model = base(x), add_adapters(quantised(kind), LowRank)
    for layer in (model[0], model[2]):
        nn.init.normal_(layer.update.adapter.G)
    model(x).sum().backward()
    assert model[0].update.adapter.H.grad.count_nonzero() > 0
    with disable_adapters(model):
        assert torch.equal(model(x), before)
    save_adapters(model, tmp_path)
    assert torch.equal(load_adapters(base, tmp_path)(x), model(x))
    with pytest.raises(
        ValueError, match="of 0 cannot be added to its weight, which is quantised: load_adapters beside"
    ):
        merge_adapters(model)
    assert torch.equal(unload_adapters(model)(x), before)


def of_shards(base, folder, rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = add_adapters(copy.deepcopy(base), LowRank, include=["0", "2"], train="3")
    for parameter in [parameter for parameter in model.parameters() if parameter.requires_grad]:
        nn.init.normal_(parameter)
    x = torch.randn(4, 3, 8)
    expected = model(x).detach()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    model(x).square().mean().backward()
    save_adapters(model, folder)
    return [expected, model(x).detach(), load_adapters(base, folder)(x).detach(), merge_adapters(model)(x).detach()]


@pytest.mark.slow
def test_sharded_adapters_are_saved_once_and_merged(tmp_path):
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Conv1d(3, 3, 3), nn.Linear(10, 6))
    for expected, *results in in_two_processes(partial(of_shards, base, tmp_path / "adapters"), tmp_path):
        for result in results:
            torch.testing.assert_close(result, expected)


class LanguageModel(nn.Module):
    """As those of transformers."""

    def __init__(self):
        super().__init__()
        self.embedding, self.up, self.lm_head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9)

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.lm_head

    def resize_token_embeddings(self, size):
        self.lm_head = nn.Linear(8, size)


def test_an_adapted_head_is_not_resized():
    model = add_adapters(LanguageModel(), LowRank, include=["up", "lm_head"])
    with pytest.raises(ValueError, match="resize_token_embeddings cannot resize the adapter of Linear.*before add_ada"):
        model.resize_token_embeddings(12)
    unload_adapters(model).resize_token_embeddings(12)
    add_adapters(model, LowRank).resize_token_embeddings(13)
    assert model.lm_head.out_features == 13


def damaged(folder, **changed):
    file = folder / "adapters.json"
    described = json.loads(file.read_text()) | changed
    described.pop("checksum", None)  # as in version 0.3
    file.write_text(json.dumps(described))


def changed_layer(folder, **changed):
    layers = json.loads((folder / "adapters.json").read_text())["layers"]
    damaged(folder, layers={**layers, "up": {**layers["up"], **changed}})


def other_weights(folder, content):
    (folder / "adapters.safetensors").unlink(missing_ok=True)
    torch.save(content, folder / "adapters.pt")
    damaged(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    {
        "another version": (lambda folder: damaged(folder, format=2), "has format 2, this version reads 1"),
        "another rank": (lambda folder: changed_layer(folder, rank=3), r"up.update.adapter.G .* shape \[16, 2\], .* 3"),
        "an unknown class": (lambda folder: changed_layer(folder, **{"class": "Odd"}), "class Odd, which is not known"),
        "a layer that is not there": (
            lambda folder: damaged(folder, layers={"down": {"class": "LowRank", "options": {}, "size": [8, 16]}}),
            "do not fit Network: include names 'down'",
        ),
        "another size": (lambda folder: changed_layer(folder, size=[15, 8]), r"up .* is for a weight \[15, 8\]"),
        "other weights": (
            lambda folder: damaged(folder, base_norms={"up.base.weight": 9.0}),
            "another base: up.base.w",
        ),
        "no description": (lambda folder: (folder / "adapters.json").write_text("{"), "adapters.json cannot be read"),
        "a trained name": (lambda folder: damaged(folder, trained=["tail.weight"]), "train tail.weight, which Network"),
        "a missing entry": (lambda folder: damaged(folder, layers={"up": {}}), r"is damaged \(KeyError: .*save the ad"),
        "NaN": (
            lambda folder: other_weights(folder, {"up.update.adapter.H": torch.tensor(torch.nan)}),
            "hold NaN or infinity in up.update.adapter.H",
        ),
    }.values(),
)
def test_files_that_do_not_fit_are_refused_and_the_base_stays(base, trained, tmp_path, damage, message):
    save_adapters(trained, tmp_path)
    damage(tmp_path)
    before = copy.deepcopy(base.state_dict())
    with pytest.raises(ValueError, match=message):
        load_adapters(base, tmp_path)
    assert list(base.state_dict()) == list(before) and all(p.requires_grad for p in base.parameters())


@pytest.mark.parametrize("file", ["adapters.json", *FORMATS[-1:]])
def test_flipped_bytes_are_refused_but_in_files_without_a_checksum(base, trained, file, tmp_path):
    save_adapters(trained, tmp_path)
    written = (tmp_path / file).read_bytes()
    changed = written.replace(b'"dropout": 0.25', b'"dropout": 0.35')
    (tmp_path / file).write_bytes(changed if file == "adapters.json" else written[:-1] + bytes([written[-1] ^ 4]))
    with pytest.raises(ValueError, match="is damaged: its files are not as save_adapters wrote them"):
        load_adapters(base, tmp_path)
    damaged(tmp_path)
    load_adapters(base, tmp_path)


def test_other_bases_missing_files_and_nan_are_refused(base, trained, tmp_path):
    save_adapters(trained, tmp_path)
    with pytest.raises(ValueError, match="Sequential"):
        load_adapters(nn.Sequential(nn.Linear(8, 16)), tmp_path)
    for factor in (1.1, torch.nan):
        other = copy.deepcopy(base)
        with torch.no_grad():
            other.norm.weight.mul_(factor)
        with pytest.raises(ValueError, match="beside another base: norm.weight has norm"):
            load_adapters(other, tmp_path)
    with pytest.raises(ValueError, match="Network has an adapter 'default' already"):
        load_adapters(trained, tmp_path)
    with pytest.raises(FileNotFoundError, match="has no adapters.json"):
        load_adapters(base, tmp_path / "elsewhere")
    trained.up.update.adapter.H.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="hold NaN or infinity in up.update.adapter.H, and are not saved"):
        save_adapters(trained, tmp_path)
    (tmp_path / "adapters.pt").unlink(missing_ok=True)
    (tmp_path / "adapters.safetensors").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError, match="copy all files"):
        load_adapters(base, tmp_path)


def test_a_part_of_the_saved_model_gets_its_adapters(base, trained, tmp_path):
    save_adapters(nn.ModuleDict({"whole": nn.ModuleDict({"network": trained})}), tmp_path)
    assert torch.equal(load_adapters(copy.deepcopy(base), tmp_path).eval()(X), trained.eval()(X))
    described = json.loads((tmp_path / "adapters.json").read_text())
    damaged(tmp_path, trained=[*described["trained"], "head.weight"])
    with pytest.raises(ValueError, match="has head.weight, which is outside of Network"):
        load_adapters(base, tmp_path)


def with_two_adapters(base):
    model = copy.deepcopy(base)
    add_adapters(model, partial(LowRank, rank=2), include=["up", "attention"])
    add_adapters(model, LDRSubdiagonal, include=["head", "up", "attention.q_proj"], name="other", dropout=0.25)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "update" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def test_each_of_several_adapters_computes_what_it_computes_alone(base, tmp_path):
    model = with_two_adapters(base)
    results = {}
    for name in ("default", "other"):
        set_adapter(model, name)
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        assert trained and all(u.requires_grad == (n in trained) for n, u in model.named_parameters())
        save_adapters(model, tmp_path / name)
        alone = load_adapters(copy.deepcopy(base), tmp_path / name).eval()
        results[name] = model(X)
        torch.testing.assert_close(alone(X), results[name])
        with merged_adapters(model):
            torch.testing.assert_close(model(X), results[name])
        merged = merge_adapters(copy.deepcopy(model))
        torch.testing.assert_close(merged(X), results[name])
        assert list(merged.state_dict()) == list(base.state_dict())
    assert not torch.allclose(*results.values())
    with disable_adapters(model):
        torch.testing.assert_close(model(X), base.eval()(X))
        with pytest.raises(ValueError, match="no adapter of Network is active"):
            save_adapters(model, tmp_path)
    loaded = load_adapters(load_adapters(base, tmp_path / "other", "b"), tmp_path / "default", "a")
    for own, name in (("a", "default"), ("b", "other")):
        set_adapter(loaded, own)
        torch.testing.assert_close(loaded.eval()(X), results[name])
    names = {u.name for u in loaded.modules() if isinstance(u, StructuredUpdate)}
    assert names == {"a", "b"}


def test_what_several_adapters_cannot_do_is_refused_and_nothing_changes(base, trained, tmp_path):
    save_adapters(trained, tmp_path)
    model = with_two_adapters(base)
    before, expected = copy.deepcopy(model.state_dict()), model(X)
    for call, message in (
        (lambda: set_adapter(model, "third"), "no adapter 'third': it has 'default', 'other'"),
        (lambda: add_adapters(model, LowRank, name="a.b"), "must be an identifier"),
        (lambda: add_adapters(model, LowRank, include="up", name="other"), "up: it has an adapter"),
        (lambda: load_adapters(model, tmp_path, "third"), "train head.weight, which Network has not"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
        assert list(model.state_dict()) == list(before) and torch.equal(model(X), expected)
    other = add_adapters(base, LowRank, include="attention")
    with pytest.raises(ValueError, match="is not that of the model, which its other adapters need"):
        load_adapters(other, tmp_path, "third")


def test_layers_of_transformers_are_found_again(tmp_path):
    model = add_adapters(nn.Sequential(Conv1D(6, 8)), LowRank)
    base = nn.Sequential(copy.deepcopy(model[0].base))
    save_adapters(model, tmp_path)
    assert type(load_adapters(base, tmp_path)[0].base) is Conv1D


class Pretrained(Network):
    """A model with the methods of transformers by which it is saved, and a head that shares the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3, 16)
        self.head.weight = self.embedding.weight
        self.config = SimpleNamespace(tie_word_embeddings=True)

    def save_pretrained(self, folder):
        torch.save(self.state_dict(), folder / "weights.pt")


def adapted_and_moved():
    torch.manual_seed(0)
    model = add_adapters(Pretrained(), partial(LowRank, rank=2), include=["up", "head", "attention"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 if parameter.requires_grad else 0.0)
    return model.eval()


def test_save_pretrained_saves_the_base_by_its_own_names(tmp_path):
    model = adapted_and_moved()
    before, after = model.state_dict(), Pretrained()
    with pytest.warns(UserWarning, match="save_pretrained of Pretrained saves the base.*save_adapters") as record:
        copy.deepcopy(model).save_pretrained(tmp_path)
    assert len(record) == 1
    after.load_state_dict(torch.load(tmp_path / "weights.pt"))
    with disable_adapters(model):
        torch.testing.assert_close(after.eval()(X), model(X))
    assert after.head.weight is after.embedding.weight
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with merged_adapters(model):
        model.save_pretrained(tmp_path)  # without a warning: of the merged weights
    assert not torch.equal(torch.load(tmp_path / "weights.pt")["up.weight"], after.up.weight)


def test_adapters_are_merged_for_a_while():
    model = adapted_and_moved()
    expected, before, names = model(X), model.state_dict(), list(Pretrained().state_dict())
    with pytest.raises(RuntimeError, match="inside"), merged_adapters(model) as merged:
        assert merged is model and list(model.state_dict()) == names
        torch.testing.assert_close(model(X), expected)
        raise RuntimeError("inside")
    assert torch.equal(model(X), expected) and list(model.state_dict()) == list(before)
    assert model.head.base.weight is model.embedding.weight and model.config.tie_word_embeddings


def test_merging_names_the_ties_that_are_lost_and_a_second_merge_is_refused():
    model = adapted_and_moved()
    with pytest.warns(UserWarning, match="no longer shared: head with embedding") as record:
        merge_adapters(model)
    assert len(record) == 1 and not model.config.tie_word_embeddings
    assert "save_pretrained" not in vars(model)
    with pytest.raises(ValueError, match="has no adapters"):
        merge_adapters(model)
