"""Second-order optimizers, structured layers and growing batches as plug-ins for PyTorch Lightning.

The public names are imported when they are first used, so that ``import lightning_struct`` alone loads neither torch
nor Lightning::

    from lightning_struct import SHF, GrowingBatchSize
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.3.0.dev0"

if TYPE_CHECKING:  # for type checkers and editors, which do not look into __getattr__
    from lightning_struct.callbacks import AdapterCheckpoint as AdapterCheckpoint
    from lightning_struct.callbacks import Compression as Compression
    from lightning_struct.callbacks import GradientStatistics as GradientStatistics
    from lightning_struct.callbacks import GrowingBatchSize as GrowingBatchSize
    from lightning_struct.callbacks import LevenbergMarquardtDamping as LevenbergMarquardtDamping
    from lightning_struct.callbacks import NoiseEstimator as NoiseEstimator
    from lightning_struct.callbacks import OperatorMonitor as OperatorMonitor
    from lightning_struct.callbacks import PredictionWriter as PredictionWriter
    from lightning_struct.callbacks import ReconstructionPlot as ReconstructionPlot
    from lightning_struct.callbacks import SolutionPlot as SolutionPlot
    from lightning_struct.callbacks import TrainingCurves as TrainingCurves
    from lightning_struct.callbacks import ValidationMeritStopping as ValidationMeritStopping
    from lightning_struct.callbacks import ValidationRule as ValidationRule
    from lightning_struct.mixins import RLSOptimization as RLSOptimization
    from lightning_struct.mixins import SHFOptimization as SHFOptimization
    from lightning_struct.nn import BlockStructured as BlockStructured
    from lightning_struct.nn import Butterfly as Butterfly
    from lightning_struct.nn import CauchyLike as CauchyLike
    from lightning_struct.nn import Circulant as Circulant
    from lightning_struct.nn import Fastfood as Fastfood
    from lightning_struct.nn import HankelLike as HankelLike
    from lightning_struct.nn import LDRSubdiagonal as LDRSubdiagonal
    from lightning_struct.nn import LDRTridiagonal as LDRTridiagonal
    from lightning_struct.nn import LowRank as LowRank
    from lightning_struct.nn import Monarch as Monarch
    from lightning_struct.nn import PrunedLinear as PrunedLinear
    from lightning_struct.nn import RandomizedHadamard as RandomizedHadamard
    from lightning_struct.nn import StructuredLinear as StructuredLinear
    from lightning_struct.nn import StructuredLSTM as StructuredLSTM
    from lightning_struct.nn import ToeplitzLike as ToeplitzLike
    from lightning_struct.nn import VandermondeLike as VandermondeLike
    from lightning_struct.nn import add_adapters as add_adapters
    from lightning_struct.nn import merge_adapters as merge_adapters
    from lightning_struct.nn import replace_linear as replace_linear
    from lightning_struct.optim import RLS as RLS
    from lightning_struct.optim import SHF as SHF
else:  # hidden from type checkers: to them an unknown name would be an object instead of an error

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value


# The same names once more, for the interpreter; a test compares the two lists.
_HOME_OF = {
    "AdapterCheckpoint": "lightning_struct.callbacks",
    "BlockStructured": "lightning_struct.nn",
    "Butterfly": "lightning_struct.nn",
    "CauchyLike": "lightning_struct.nn",
    "Circulant": "lightning_struct.nn",
    "Compression": "lightning_struct.callbacks",
    "Fastfood": "lightning_struct.nn",
    "GradientStatistics": "lightning_struct.callbacks",
    "GrowingBatchSize": "lightning_struct.callbacks",
    "HankelLike": "lightning_struct.nn",
    "LDRSubdiagonal": "lightning_struct.nn",
    "LDRTridiagonal": "lightning_struct.nn",
    "LevenbergMarquardtDamping": "lightning_struct.callbacks",
    "LowRank": "lightning_struct.nn",
    "Monarch": "lightning_struct.nn",
    "NoiseEstimator": "lightning_struct.callbacks",
    "OperatorMonitor": "lightning_struct.callbacks",
    "PredictionWriter": "lightning_struct.callbacks",
    "PrunedLinear": "lightning_struct.nn",
    "RandomizedHadamard": "lightning_struct.nn",
    "RLS": "lightning_struct.optim",
    "RLSOptimization": "lightning_struct.mixins",
    "ReconstructionPlot": "lightning_struct.callbacks",
    "SHF": "lightning_struct.optim",
    "SHFOptimization": "lightning_struct.mixins",
    "SolutionPlot": "lightning_struct.callbacks",
    "StructuredLSTM": "lightning_struct.nn",
    "StructuredLinear": "lightning_struct.nn",
    "ToeplitzLike": "lightning_struct.nn",
    "TrainingCurves": "lightning_struct.callbacks",
    "ValidationMeritStopping": "lightning_struct.callbacks",
    "ValidationRule": "lightning_struct.callbacks",
    "VandermondeLike": "lightning_struct.nn",
    "add_adapters": "lightning_struct.nn",
    "merge_adapters": "lightning_struct.nn",
    "replace_linear": "lightning_struct.nn",
}

__all__ = list(_HOME_OF)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
