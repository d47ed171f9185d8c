"""The list of recipes: what each trains, its configs, how they are found. Imports the standard library alone."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

SHF_PAPER = "Emirahmetoglu & Stewart, Training Autoencoders Using Stochastic Hessian-Free Optimization with LSMR (SHF)"
RLS_PAPER = "Zhang et al., Revisiting Recursive Least Squares for Training Deep Neural Networks (RLS)"
LDR_PAPER = "Thomas et al., Learning Compressed Transforms with Low Displacement Rank (LDR)"

PINN_PAPER = "Dangel, Müller & Zeinhofer, Kronecker-Factored Approximate Curvature for Physics-Informed Neural Networks"
NO_PAPER = "no paper: an example of this package"
BURGERS_PAPER = "Raissi, Perdikaris & Karniadakis, Physics-Informed Neural Networks"


@dataclass(frozen=True)
class Recipe:
    """A task that can be run, most often of a paper.

    Attributes:
        trains: the network and the data set, or the equation.
        paper: the one that the task is from; or that there is none.
        section: of the paper; empty where there is none.
        data: where the data come from.
        default_config: the config that is run without ``--config``.
    """

    trains: str
    paper: str
    section: str
    data: str
    default_config: str


RECIPES: Mapping[str, Recipe] = {
    "curves_autoencoder": Recipe(
        "autoencoder 784-400-200-100-50-25-6 of curves", SHF_PAPER, "section 6", "made by the recipe", "shf"
    ),
    "mnist_autoencoder": Recipe(
        "autoencoder 784-1000-500-250-30 of MNIST", SHF_PAPER, "section 6", "MNIST, downloaded", "shf"
    ),
    "usps_autoencoder": Recipe(
        "autoencoder 256-400-200-100-50-25 of USPS", SHF_PAPER, "section 6", "USPS, downloaded", "shf"
    ),
    "mnist_fnn": Recipe(
        "fully connected classifier 784-512-10 of MNIST", RLS_PAPER, "section VI-A", "MNIST, downloaded", "rls"
    ),
    "cifar_cnn": Recipe(
        "mini VGG, five convolutions, on CIFAR-10", RLS_PAPER, "section VI-A", "CIFAR-10, downloaded", "rls"
    ),
    "imdb_lstm": Recipe(
        "LSTM, two layers of 512 units, on reviews", RLS_PAPER, "section VI-A", "IMDB, downloaded", "rls"
    ),
    "structured_image": Recipe(
        "network with a structured hidden layer, on MNIST variants",
        LDR_PAPER,
        "Tables 1, 6 to 13",
        "files of MNIST-bg-rot, or made from MNIST",
        "ldr_sd",
    ),
    "structured_conv": Recipe(
        "structured layers in place of a convolution, on CIFAR-10",
        LDR_PAPER,
        "Table 3",
        "CIFAR-10, downloaded",
        "ldr_sd",
    ),
    "wikitext_lstm": Recipe(
        "LSTM language model with structured matrices",
        LDR_PAPER,
        "Table 2",
        "files of WikiText-2, or any text file",
        "ldr_sd",
    ),
    "compress_network": Recipe(
        "small ResNet or character transformer, trained, compressed and trained on",
        NO_PAPER,
        "",
        "CIFAR-10, downloaded, or any text file",
        "resnet",
    ),
    "poisson_pinn": Recipe(
        "physics-informed network 2-64-1 for Poisson's equation",
        PINN_PAPER,
        "section 4",
        "points, drawn by the recipe",
        "shf",
    ),
    "heat_pinn": Recipe(
        "physics-informed network 2-64-1 for the heat equation",
        PINN_PAPER,
        "section 4",
        "points, drawn by the recipe",
        "shf",
    ),
    "burgers_pinn": Recipe(
        "physics-informed network 2-20-20-20-1 for Burgers' equation",
        BURGERS_PAPER,
        "section 3",
        "points, drawn by the recipe",
        "shf",
    ),
}


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
    sentences = [
        f"There is no file {text}, and no config of that name.",
        did_you_mean(wanted, known),
        f"The configs of {listed} are {', '.join(config_names(listed))}.",
    ]
    raise LookupError(" ".join(filter(None, sentences)))


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """A question after the likeliest of the ``known`` names, empty if none is near.

    Example:
        >>> did_you_mean("fitt", ["fit", "validate", "test", "predict"])
        'Did you mean fit?'
        >>> did_you_mean("nothing like it", ["fit"])
        ''
    """
    nearest = difflib.get_close_matches(wrong, list(known), n=1)
    return f"Did you mean {nearest[0]}?" if nearest else ""
