"""What the benchmarks share does what it promises, and each script says how it is used."""

import re
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

DIRECTORY = Path(__file__).resolve().parents[1] / "benchmarks"
SCRIPTS = sorted(file.stem for file in DIRECTORY.glob("*.py") if "def main(" in file.read_text())


@pytest.fixture(autouse=True)
def directory_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DIRECTORY)


@pytest.fixture
def harness() -> ModuleType:
    return import_module("harness")


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_help_of_each_script_names_its_command(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit, match="^0$"):
        import_module(script).main()
    assert f"python benchmarks/{script}.py" in capsys.readouterr().out


def test_a_run_whose_line_is_there_is_not_repeated(harness: ModuleType, tmp_path: Path) -> None:
    experiment, name = tmp_path / "below" / "rates_0.5", harness.run_name("adam 1e-3", 0)
    assert harness.run_once(experiment, name, lambda: {"error": 2.5}) == {"error": 2.5}
    assert harness.run_once(experiment, name, lambda: pytest.fail("the run was repeated")) is None
    (run,) = harness.load_runs(experiment)
    assert (run["run"], run["error"]) == ("adam_1e-3_0", 2.5)
    assert torch.__version__.startswith(run["machine"]["torch"]) and run["machine"]["cpu"]
    assert [file.name for file in (tmp_path / "below").iterdir()] == ["rates_0.5.jsonl"]


def test_a_run_that_fails_leaves_no_line(harness: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        harness.run_once(tmp_path / "runs", "run", lambda: {"error": 1 / 0})
    assert harness.load_runs(tmp_path / "runs") == []


def test_runs_are_in_the_order_of_their_names_and_the_last_line_of_a_name_counts(
    harness: ModuleType, tmp_path: Path
) -> None:
    for name, error in (("η = 2", 1.0), ("a", 2.0), ("η = 2", 3.0)):
        harness.keep_run(tmp_path / "runs", name, {"error": error})
    assert [(run["run"], run["error"]) for run in harness.load_runs(tmp_path / "runs")] == [("a", 2.0), ("η = 2", 3.0)]
    assert (tmp_path / "runs.jsonl").read_bytes().isascii()


def test_a_torn_line_is_ignored_with_a_warning_and_its_run_is_repeated(harness: ModuleType, tmp_path: Path) -> None:
    experiment, file = tmp_path / "runs", tmp_path / "runs.jsonl"
    for name in ("first", "second"):
        harness.keep_run(experiment, name, {"error": 1.0})
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.warns(UserWarning, match="line 2 of .*runs.jsonl is incomplete"):
        assert [run["run"] for run in harness.load_runs(experiment)] == ["first"]
    with pytest.warns(UserWarning, match="line 2"):
        harness.run_once(experiment, "second", lambda: {"error": 2.0})
    with pytest.warns(UserWarning, match="line 2"):
        assert [run["error"] for run in harness.load_runs(experiment)] == [1.0, 2.0]


def test_runs_that_are_kept_at_once_do_not_mix(harness: ModuleType, tmp_path: Path) -> None:
    def keep(name: str) -> None:  # each write has a file descriptor of its own, as in a process of its own
        harness.keep_run(tmp_path / "runs", name, {"values": [0.5] * 5000})

    names = [f"run {number:02d}" for number in range(40)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(keep, names))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [run["run"] for run in harness.load_runs(tmp_path / "runs")] == names


def test_missing_runs_are_made_and_a_missing_package_leaves_its_run_out(
    harness: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_package() -> dict[str, object]:
        raise ImportError("no module named 'rival'")

    harness.keep_run(tmp_path / "squares", "3", {"square": 0})
    jobs = {"3": lambda: {"square": 9}, "rival": without_package, "4": lambda: {"square": 16}}
    assert [run["square"] for run in harness.run_all(tmp_path / "squares", jobs, is_report=True)] == [0]
    assert [run["square"] for run in harness.run_all(tmp_path / "squares", jobs)] == [0, 16]
    assert capsys.readouterr().out.splitlines() == ["rival is left out: no module named 'rival'", "4: done"]


def test_the_table_of_known_numbers(harness: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    harness.print_header("way", "seconds")
    harness.print_row("adam", harness.spread([3.0, 1.0, 2.5], "{:.1f}"))
    harness.print_row("shf", harness.spread([2.0, 2.0], "{:,.0f} s", bold=True))
    table = ["", "| way | seconds |", "|---|---|", "| adam | 2.5 (1.0 to 3.0) |", "| shf | **2 s** |", ""]
    assert capsys.readouterr().out.split("\n") == table


class Readings:
    """A clock that is a second later at each reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class OneWeight(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return (self.weight * batch[0]).mean()

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(harness: ModuleType, clock: L.Callback) -> L.Trainer:
    loader = DataLoader(TensorDataset(torch.ones(5, 1)))
    trainer = harness.bare_trainer(clock, max_epochs=2, val_check_interval=1, num_sanity_val_steps=1)
    trainer.fit(OneWeight(), loader, loader)
    return trainer


def test_the_clock_never_goes_back_and_begins_with_training(harness: ModuleType) -> None:
    seconds: list[float] = []

    class Recorded(harness.TrainingClock):
        def on_train_batch_end(self, *arguments: object) -> None:
            seconds.append(self.seconds)

    clock = Recorded()
    assert clock.seconds == 0.0
    fit(harness, clock)
    assert len(seconds) == 10 and seconds[0] >= 0.0
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("count_validation, expected", [(True, 1), (False, 11)])
def test_the_clock_stands_still_in_validation_if_told_to(
    harness: ModuleType, count_validation: bool, expected: int
) -> None:
    # By the readings: one between the start and the question, and without validation one for each of 10 pieces, too.
    clock = harness.TrainingClock(count_validation=count_validation, now=Readings())
    fit(harness, clock)
    assert clock.seconds == expected


def test_the_clock_ends_the_training_at_its_bound(harness: ModuleType) -> None:
    assert fit(harness, harness.TrainingClock(3.5, now=Readings())).global_step == 4


def test_the_growing_batch_is_compared_with_the_users_own(capsys: pytest.CaptureFixture[str]) -> None:
    def run(way: str, seed: int, *losses: float) -> dict[str, object]:
        points = [{"samples": 0, "steps": 100 * i, "seconds": 4.0 * i, "loss": loss} for i, loss in enumerate(losses)]
        return {"task": "mnist", "way": way, "seed": seed, "points": points, "sizes": []}

    module = import_module("growing_batch_size")
    runs = [run("fixed ×1", seed, 2.3, 0.4, 0.2, 0.1 + 0.01 * seed) for seed in range(3)]
    runs += [run("fixed ×2", seed, 2.3, 0.4, 0.3, 0.2) for seed in range(3)]
    runs += [run(module.DEFAULT, seed, 2.3, 0.3, 0.1, 0.09) for seed in range(3)]
    runs += [run(module.SCALED, 0, 2.3, 0.5, 0.4, 0.3)]
    module.report(runs)
    printed = capsys.readouterr().out
    assert "| fixed ×1 | **0.1100** (0.1000 to 0.1200) | 300 | 12 | 32 |" in printed
    assert "| 0.1000 / 0.1100 / 0.1200 | 0.0900 / 0.0900 / 0.0900 | -0.0200 | 0.0200 |" in printed


def test_a_branch_that_changes_nothing_ends_as_the_run_that_it_continues() -> None:
    module = import_module("growing_batch_size_at_end")
    options = SimpleNamespace(seed=0, share=0.01, synthetic=True, data_dir="")
    run = module.Branches(import_module("growing_batch_size").TASKS["usps"], options)
    assert run.branch({0.8: 1}, False) == run.own != run.branch({0.9: 2}, False)


@pytest.mark.parametrize("classes", [False, True])
def test_structured_layers_are_timed_beside_a_dense_one(classes: bool, capsys: pytest.CaptureFixture[str]) -> None:
    module = import_module("structured_layers")
    module.table(True, [1], SimpleNamespace(sizes=[64], ranks=[1, 2], rounds=1, classes=classes))
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| 64")]
    ours = module.classes_of(64) if classes else {f"LDR-SD, r = {r}": module.layer_of(64, r) for r in (1, 2)}
    counts = {name: f"{layer.weight_parameters:,}" for name, layer in ours.items()}
    assert {row[1]: row[2] for row in rows} == {"dense, ms": "4,096"} | counts


def test_the_lowest_error_of_adam_is_compared_seed_by_seed(capsys: pytest.CaptureFixture[str]) -> None:
    def runs(name: str, *errors: float) -> list[dict[str, object]]:
        points = [{"cpu": 10.0 * i, "error": error} for i, error in enumerate(errors)]
        return [{"name": name, "seed": 0, "validations": points}]

    by_name = {"adam 1e-3": runs("adam 1e-3", 9, 3), "adam 2e-3": runs("adam 2e-3", 9, 5, 2)}
    import_module("autoencoders").compare_with_adam(by_name | {"kronecker": runs("kronecker", 9, 1.5)})
    assert "| 0 | 2.000 | adam 2e-3 20, 2.000; kronecker 10, 1.500 |" in capsys.readouterr().out


def test_the_tables_of_the_papers_are_those_of_the_data() -> None:
    papers = import_module("papers")
    page = papers.PAGE.read_text()
    assert papers.filled(page) == page, "run: python benchmarks/papers.py"
    assert [name for name, _ in papers.BLOCK.findall(page)] == list(papers.TABLES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["compress", "continual", "growing_batch_size", "least_squares", "poisson", "structured_speed", "usps"]
)
def test_a_picture_is_drawn_from_the_tables_of_its_page(name: str) -> None:
    figure = import_module("pictures").PICTURES[name]()
    assert all(axes.get_title() and axes.lines for axes in figure.axes if axes.axison)


def test_optimizers_have_their_own_colours() -> None:
    others = {"L-BFGS", "SSBroyden", "torch-levenberg-marquardt", "Martens' method", "SHF of the paper"}
    names = {"SHF", "RLS", "Adam", "SGD", "SOAP", *others}
    assert len({import_module("style").color_of(name) for name in names}) == len(names)


def test_every_picture_of_a_page_is_drawn_by_the_script_or_stands_on_a_card() -> None:
    docs = DIRECTORY.parent / "docs"
    pages = "\n".join(page.read_text() for page in docs.rglob("*.md"))
    on_cards = set(re.findall(r"images/(\w+)\.png#card\)", pages))
    assert {path.stem for path in (docs / "images").glob("*.png")} == {*import_module("pictures").PICTURES, *on_cards}


def test_a_table_changes_with_its_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, harness: ModuleType) -> None:
    papers = import_module("papers")
    monkeypatch.setattr(papers, "DATA", tmp_path)
    page = "before\n<!-- table: rls_figures_4_and_5 -->\nold\n<!-- end -->\nbehind\n"
    for seed, accuracy in ((1, 0.5), (0, 0.25)):
        run = {"way": "k = 1", "seed": seed, "epochs": [{"test_accuracy": accuracy}], "seconds": 3.0 + seed}
        harness.keep_run(tmp_path / "rls/sweep_mnist_3_epochs", str(seed), run)
    made = papers.filled(page)
    assert made.startswith("before\n<!-- table") and made.endswith("<!-- end -->\nbehind\n") and "old" not in made
    assert "| k = 1 | 25.00, 50.00 |  |  |" in made
    assert papers.filled(made) == made
    monkeypatch.setattr(papers, "TABLES", {"one": papers.figures_4_and_5, "machines": papers.machines})
    assert papers.machines().rows == [[harness.machine_line(), "2", "3 to 4"]]


def test_commands_that_differ_in_their_seeds_are_one() -> None:
    commands = [f"python a.py --seeds {seeds} --epochs 3" for seeds in ("0", "2 1")] + ["python b.py"]
    assert import_module("papers").commands_of({"command": command} for command in commands) == [
        "python a.py --seeds 0 1 2 --epochs 3",
        "python b.py",
    ]


def test_a_run_names_its_command_without_folders_of_its_machine(
    harness: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "text.txt").touch()
    monkeypatch.chdir(tmp_path / "here")
    outside = ["--data-dir", str(tmp_path), "--text-file", str(tmp_path / "text.txt")]
    monkeypatch.setattr(sys, "argv", ["/some/where/script.py", *outside, "--output", "results"])
    assert harness.command() == "python benchmarks/script.py --data-dir DIRECTORY --text-file text.txt --output results"


def test_a_grid_of_rates_goes_on_where_its_best_is_at_an_end() -> None:
    missing_factors = import_module("rls_rivals").missing_factors
    assert missing_factors({}) == [1 / 3, 1.0, 3.0]
    assert missing_factors({1 / 3: 0.5, 1.0: 0.6, 3.0: 0.4}) == []
    assert missing_factors({1 / 3: 0.4, 1.0: 0.5, 3.0: 0.6}) == [9.0]
    assert missing_factors({1 / 3: 0.6, 1.0: 0.5, 3.0: 0.4}) == [1 / 9]
    assert missing_factors({1 / 3: 0.4, 1.0: 0.5, 3.0: 0.6, 9.0: 0.7}) == []  # only once


@pytest.mark.parametrize("way", ["AdamW", "Muon", "HRLS+M", "HRLS+M, default"])
def test_each_rival_trains_all_weights_of_a_network(way: str) -> None:
    module = import_module("rls_rivals")
    if way == "Muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has no Muon before 2.9")
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, bias=False), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten()
    )
    network.add_module("output", torch.nn.Linear(16, 3))
    before = [parameter.detach().clone() for parameter in network.parameters()]
    images, labels = torch.randn(6, 1, 4, 4), torch.arange(6) % 3
    data = {part: (images, labels) for part in ("train", "val", "test")}
    task = module.Task("", lambda options: data, lambda: network, 3, (0.0, 0.0), batch_size=6)
    run = module.train(task, module.WAYS[way], module.WAYS[way].rate, 0, 1e9, data, (0.0, 0.0, 0.0))
    assert run["error"] is None and [point["steps"] for point in run["points"]] == [1, 2, 3]
    assert not any(map(torch.equal, before, network.parameters()))
