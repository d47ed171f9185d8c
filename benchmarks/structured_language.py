"""``structured_tasks.py language``: perplexity of a language model whose input-hidden matrices are structured."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path

import lightning as L
import torch
from torch import nn

import harness
from harness import Run
from lightning_struct.data import TextCorpusDataModule
from lightning_struct.models import LanguageModel
from lightning_struct.models.structured import LayerOfSizes
from paper_tables import LANGUAGE_RANKS, TABLE_2, Way
from structured_classes import RANKED, BestWeights, finished, title, ways_in

LEAST_COUNT = 3  # of a word of WikiText


def language_ways(classes: Sequence[str], ranks: Sequence[int]) -> list[Way]:
    """The ranks are those of LDR-SD; the classes without operators have one more, which makes the same budget."""
    ways: list[Way] = [("unstructured", None)] if "unstructured" in classes else []
    ways += [(name, rank if name == "ldr_sd" else rank + 1) for name in TABLE_2 if name in classes for rank in ranks]
    return ways


def train_language(way: Way, seed: int, data: TextCorpusDataModule, options: argparse.Namespace) -> Run:
    L.seed_everything(seed, verbose=False)
    name, rank = way
    layer: LayerOfSizes = nn.Linear if rank is None else partial(RANKED[name], rank=rank, init="variance")
    plateau = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, factor=0.25, patience=0, threshold=0.0)
    model = LanguageModel(
        data.vocabulary_size,
        layer=layer,
        balanced=True,
        optimizer=partial(torch.optim.Adam, lr=options.adam) if options.adam else partial(torch.optim.SGD, lr=20.0),
        lr_scheduler=plateau,
    )
    if options.normal_embedding or options.frozen_embedding:
        nn.init.normal_(model.embedding.weight)
        model.embedding.requires_grad_(not options.frozen_embedding)
    best = BestWeights("val_loss", -1)
    trainer = harness.bare_trainer(best, max_epochs=options.epochs, gradient_clip_val=0.25)
    began = time.process_time()
    try:
        trainer.fit(model, datamodule=data)
    except ValueError as not_finite:
        return {"error": str(not_finite)}
    seconds = time.process_time() - began
    model.load_state_dict(best.weights)
    (metrics,) = trainer.test(model, datamodule=data, verbose=False)
    gates = layer(model.hparams["embedding_size"], model.hparams["hidden_size"])
    weights = sum(parameter.numel() for key, parameter in gates.named_parameters() if key != "bias")
    return {
        "val_perplexities": [math.exp(value) for value in best.values],
        "test_perplexity": metrics["test_perplexity"],
        "seconds": seconds,
        "parameters": 4 * weights,
    }


def run_language(options: argparse.Namespace) -> None:
    data = TextCorpusDataModule(
        options.data_dir, options.text_file, synthetic=options.synthetic, least_count=options.least_count
    )
    source = "synthetic" if options.synthetic else Path(options.text_file).stem if options.text_file else "wikitext-2"
    folder = f"language_{source}_{options.epochs}_epochs"
    folder += f"_count_{options.least_count}" if options.least_count != LEAST_COUNT else ""
    folder += "_frozen" if options.frozen_embedding else "_normal" if options.normal_embedding else ""
    folder += f"_adam_{options.adam:g}" if options.adam else ""

    kept = ("epochs", "normal_embedding", "frozen_embedding", "least_count", "adam")
    settings = {key: getattr(options, key) for key in kept}
    settings |= {"text": source, "words": len(data.corpus.train), "vocabulary": data.vocabulary_size}

    def train(way: Way, seed: int) -> Run:
        return {**settings, "way": way, "seed": seed, **train_language(way, seed, data, options)}

    wanted = product(options.seeds, language_ways(options.classes, options.ranks))
    jobs = {harness.run_name(*way, seed): partial(train, way, seed) for seed, way in wanted}
    runs = harness.run_all(options.output / folder, jobs, options.report)
    print(f"\n{source}: {len(data.corpus.train):,} training words, vocabulary {data.vocabulary_size:,}")
    harness.print_machines(runs)
    harness.print_header("input-hidden matrices", "parameters", "test perplexity by seed", "seconds of a run")
    for way in ways_in(runs):
        of_way = finished(runs, way)
        if not of_way:
            harness.print_row(title(way), "", "diverged", "")
            continue
        harness.print_row(
            title(way),
            f"{of_way[0]['parameters']:,}",
            " / ".join(f"{run['test_perplexity']:.2f}" for run in of_way),
            f"{statistics.median(run['seconds'] for run in of_way):.0f}",
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text-file", help="a plain text instead of WikiText-2")
    parser.add_argument("--classes", nargs="+", choices=("unstructured", *TABLE_2), default=("unstructured", *TABLE_2))
    parser.add_argument("--ranks", type=int, nargs="+", default=LANGUAGE_RANKS, help="of LDR-SD, for the budgets")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument(
        "--normal-embedding", action="store_true", help="it begins with entries of N(0, 1), ten times as large"
    )
    parser.add_argument(
        "--frozen-embedding", action="store_true", help="the same, never trained: the matrices alone read the words"
    )
    parser.add_argument("--adam", type=float, metavar="RATE", help="Adam at this rate instead of SGD at 20")
    parser.add_argument(
        "--least-count", type=int, default=LEAST_COUNT, help="words that the text file has less often are <unk>"
    )
