"""LSTM language model of WikiText-2 with structured input-hidden matrices: Thomas et al., Table 2 and Appendix F.2.

Run it by one of

- ``python -m lightning_struct.recipes.wikitext_lstm fit``
- ``python -m lightning_struct.recipes.wikitext_lstm fit --data.text_file=FILE``

The budgets of the table are ``--model.layer.rank``: 1, 2, 4, 8, 16 and 24 for LDR-SD, one more for the classes
without operators of their own: 2, 3, 5, 9, 17 and 25.
"""

from collections.abc import Sequence

from lightning_struct.data import TextCorpusDataModule
from lightning_struct.models import LanguageModel
from lightning_struct.recipes.cli import LANGUAGE_MODEL_RESULTS, RecipeCLI, run_recipe
from lightning_struct.recipes.errors import run_command

LINKS = {"data.vocabulary_size": "model.init_args.vocabulary_size"}


def main(args: Sequence[str] | None = None) -> RecipeCLI:
    """Run the recipe on ``args``, by default on the command line of this process."""
    return run_recipe("wikitext_lstm", LanguageModel, TextCorpusDataModule, LANGUAGE_MODEL_RESULTS, args, links=LINKS)


if __name__ == "__main__":
    run_command(main)
