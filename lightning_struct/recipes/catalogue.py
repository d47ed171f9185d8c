"""The list of recipes: networks, data, shown results, and how configs are found.

It imports the standard library alone, so that recipes are listed at once; classes are named, not imported.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

SHF_PAPER = "Emirahmetoglu & Stewart, Training Autoencoders Using Stochastic Hessian-Free Optimization with LSMR (SHF)"
RLS_PAPER = "Zhang et al., Revisiting Recursive Least Squares for Training Deep Neural Networks (RLS)"
LDR_PAPER = "Thomas et al., Learning Compressed Transforms with Low Displacement Rank (LDR)"
PINN_PAPER = "Dangel, Müller & Zeinhofer, Kronecker-Factored Approximate Curvature for Physics-Informed Neural Networks"
BURGERS_PAPER = "Raissi, Perdikaris & Karniadakis, Physics-Informed Neural Networks"
KDV_PAPER = "Zabusky & Kruskal, Interaction of 'Solitons' in a Collisionless Plasma"


@dataclass(frozen=True)
class Results:
    """The results that the recipes of one kind of task show at the end of ``fit``, and their files.

    Attributes:
        metrics: for each metric of a test run that is shown, its heading and its format.
        predictions: name of the results of ``predict``.
        log_every_n_steps: few and long steps are all logged.
        gap: the metric whose difference between training and test set is shown, too.
    """

    metrics: Mapping[str, tuple[str, str]]
    predictions: str
    log_every_n_steps: int
    gap: str | None = None


AUTOENCODER = Results(
    {"test_loss": ("½‖x̂ - x‖²", "#.4g"), "test_squared_error": ("‖x̂ - x‖²", "#.4g")}, "reconstructions", 1
)
CLASSIFIER = Results({"test_loss": ("loss", "#.4g"), "test_accuracy": ("accuracy", ".2%")}, "classes", 50)
STRUCTURED_CLASSIFIER = replace(CLASSIFIER, gap="test_accuracy")
LANGUAGE_MODEL = Results({"test_loss": ("nats", "#.4g"), "test_perplexity": ("perplexity", ".2f")}, "words", 50)
EQUATION = Results(
    {"test_loss": ("Σ ½ mean r²", ".2e"), "relative_l2_error": ("relative L² error", ".2e")}, "field", 10
)


@dataclass(frozen=True)
class Recipe:
    """A task of a paper that can be run.

    Attributes:
        trains: the network and the data set, or the equation.
        paper: the one that the task is from.
        section: the section of the paper.
        data: the source of the data.
        model_class: name in ``lightning_struct.models``: the configured model is of this class or derived from it.
        data_class: name in ``lightning_struct.data``: the data module, configured by ``--data.*``. If the class is
            abstract, ``--data`` names one that is derived from it.
        results: the metrics shown at the end of ``fit``.
        default_config: the config that is run without ``--config``.
        quick: options of ``--quick``, a trial within a minute: a small network, few samples, few steps.
        links: arguments of the model by the attributes of the data module that they are taken from.
        about_quick: a sentence about what to expect of a trial that does not show learning.
    """

    trains: str
    paper: str
    section: str
    data: str
    model_class: str
    data_class: str
    results: Results
    default_config: str
    quick: tuple[str, ...]
    links: Mapping[str, str] = field(default_factory=dict)
    about_quick: str = ""


def _quick(epochs: int, **sizes: int) -> tuple[str, ...]:
    """The options of a trial on synthetic data of these sizes, by the names of the options without ``_size``."""
    few = (f"--data.{name}_size={size}" for name, size in sizes.items())
    return (f"--trainer.max_epochs={epochs}", "--trainer.max_time=00:00:00:30", "--data.synthetic=true", *few)


def _autoencoder(trains: str, data: str, data_class: str, pixels: int = 784) -> Recipe:
    quick = _quick(5, train=2000, val=500, test=500, batch=100) + (f"--model.layer_sizes=[{pixels},100,20]",)
    return Recipe(trains, SHF_PAPER, "section 6", data, "Autoencoder", data_class, AUTOENCODER, "shf", quick)


def _classifier(trains: str, data: str, data_class: str, *smaller: str) -> Recipe:
    quick = _quick(3, train=2000, val=500, test=500, batch=50) + smaller
    return Recipe(trains, RLS_PAPER, "section VI-A", data, "Classifier", data_class, CLASSIFIER, "rls", quick)


def _equation(trains: str, paper: str, section: str, *fewer: str) -> Recipe:
    return Recipe(
        f"physics-informed network {trains} equation", paper, section, "points, drawn by the recipe",
        "PhysicsInformedNetwork", "PointsDataModule", EQUATION, "shf",
        ("--trainer.max_epochs=3", "--data.steps_per_epoch=10", *fewer),
        {"data.equation": "model.init_args.equation"},
    )  # fmt: skip


FEW_IN_INTERVALS = (
    "--data.counts={interior: 200, initial: 50}",
    "--data.steps_per_epoch=20",
    "--data.eval_count=1000",
)


def _structured(trains: str, section: str, data: str, data_class: str, quick: tuple[str, ...]) -> Recipe:
    return Recipe(trains, LDR_PAPER, section, data, "Classifier", data_class, STRUCTURED_CLASSIFIER, "ldr_sd", quick)


RECIPES: Mapping[str, Recipe] = {
    "curves_autoencoder": _autoencoder(
        "autoencoder 784-400-200-100-50-25-6 of curves", "made by the recipe", "CurvesDataModule"
    ),
    "mnist_autoencoder": _autoencoder(
        "autoencoder 784-1000-500-250-30 of MNIST", "MNIST, downloaded", "MNISTDataModule"
    ),
    "usps_autoencoder": _autoencoder(
        "autoencoder 256-400-200-100-50-25 of USPS", "USPS, downloaded", "USPSDataModule", 256
    ),
    "mnist_fnn": _classifier("fully connected classifier 784-512-10 of MNIST", "MNIST, downloaded", "MNISTDataModule"),
    "cifar_cnn": _classifier(
        "mini VGG, five convolutions, on CIFAR-10", "CIFAR-10, downloaded", "CIFAR10DataModule",
        "--model.network.channels=8", "--model.network.hidden=64",
    ),
    "imdb_lstm": _classifier(
        "LSTM, two layers of 512 units, on reviews", "IMDB, downloaded", "IMDBDataModule",
        "--data.vocabulary_size=100", "--model.network.vocabulary_size=100", "--data.max_length=20",
        "--model.network.embedding_size=32", "--model.network.hidden_size=32", "--model.network.num_layers=1",
        "--trainer.max_epochs=6",
    ),
    "structured_image": _structured(
        "network with a structured hidden layer, on MNIST variants", "Tables 1, 6 to 13",
        "files of MNIST-bg-rot, or made from MNIST", "InMemoryDataModule",
        _quick(3, train=2000, test=500) + ("--model.optimizer.lr=0.01",),
    ),
    "structured_conv": replace(_structured(
        "structured layers in place of a convolution, on CIFAR-10", "Table 3", "CIFAR-10, downloaded",
        "CIFAR10DataModule", _quick(3, train=100, val=20, test=20, batch=10),
    ), about_quick="Thirty steps of this network teach it nothing yet: it ends at chance, an accuracy of about 10 %."),
    "wikitext_lstm": Recipe(
        "LSTM language model with structured matrices", LDR_PAPER, "Table 2", "files of WikiText-2, or any text file",
        "LanguageModel", "TextCorpusDataModule", LANGUAGE_MODEL, "ldr_sd",
        _quick(3, train=28_000, val=2000, test=2000) + ("--data.synthetic_vocabulary=100",),
        {"data.vocabulary_size": "model.init_args.vocabulary_size"},
    ),
    "poisson_pinn": _equation("2-64-1 for Poisson's", PINN_PAPER, "section 4"),
    "heat_pinn": _equation("2-64-1 for the heat", PINN_PAPER, "section 4"),
    "burgers_pinn": _equation(
        "2-20-20-20-1 for Burgers'", BURGERS_PAPER, "section 3",
        "--data.counts={interior: 400, boundary: 40, initial: 80}",
    ),
    "allen_cahn_pinn": _equation(
        "9-16-16-1 in ten intervals of time for the Allen-Cahn", BURGERS_PAPER, "section 3.2", *FEW_IN_INTERVALS
    ),
    "kdv_pinn": _equation(
        "9-16-16-1 in ten intervals of time for the Korteweg-de Vries", KDV_PAPER, "equation (1)", *FEW_IN_INTERVALS
    ),
}  # fmt: skip


def config_directory(name: str) -> Path:
    """Folder of a recipe's YAML files: in the wheel, or in the checkout of an editable install."""
    packaged, checkout = Path(__file__).parent / "configs", Path(__file__).parents[2] / "recipes"
    return (packaged if packaged.is_dir() else checkout) / name


def config_names(name: str) -> list[str]:
    """Names of a recipe's configs, the default one first."""
    default = RECIPES[name].default_config
    names = {path.stem for path in config_directory(name).glob("*.yaml")}
    return [default, *sorted(names - {default})]


def default_config(name: str) -> Path:
    """The file that a recipe is run with if none is named."""
    return config_directory(name) / f"{RECIPES[name].default_config}.yaml"


def find_config(text: str, recipe: str) -> str:
    """Path of the config that ``text`` names.

    Args:
        text: a path; or the name of a config of the recipe, such as ``hrls`` or ``hrls.yaml``; or that of a config of
            any recipe, such as ``mnist_fnn/hrls``. A file that exists is taken before a name.
        recipe: whose configs need no recipe before their names.

    Returns:
        A path. ``text`` itself if it is a file, a URL, or YAML or JSON rather than a name.

    Raises:
        LookupError: if there is neither such a file nor such a config; the message lists the names.

    Example:
        >>> Path(find_config("hrls", recipe="mnist_fnn")).name
        'hrls.yaml'
        >>> find_config("hrsl", recipe="mnist_fnn")
        Traceback (most recent call last):
            ...
        LookupError: There is no file hrsl, and no config of that name. Did you mean hrls? The configs of ...
    """
    if Path(text).is_file() or any(sign in text for sign in "{:\n"):
        return text
    wanted = text.removesuffix(".yaml").removesuffix(".yml")
    owner, _, config = wanted.rpartition("/")
    owner = owner or recipe
    if owner in RECIPES and config in config_names(owner):
        return str(config_directory(owner) / f"{config}.yaml")
    known = [*config_names(recipe), *(f"{name}/{config}" for name in RECIPES for config in config_names(name))]
    listed = owner if owner in RECIPES else recipe
    there = f"The configs of {listed} are {', '.join(config_names(listed))}."
    raise LookupError(did_you_mean(wanted, known, f"There is no file {text}, and no config of that name.", there))


def did_you_mean(wrong: str, known: Iterable[str], before: str = "", after: str = "") -> str:
    """A question after the likeliest of the ``known`` names, empty if none is near, between two other sentences.

    Example:
        >>> did_you_mean("fitt", ["fit", "validate", "test", "predict"])
        'Did you mean fit?'
        >>> did_you_mean("nothing like it", ["fit"])
        ''
    """
    nearest = difflib.get_close_matches(wrong, list(known), n=1)
    question = f"Did you mean {nearest[0]}?" if nearest else ""
    return " ".join(filter(None, (before, question, after)))
