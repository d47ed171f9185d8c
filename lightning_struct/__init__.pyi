"""The public names, for type checkers, and for ``__init__.py``, which imports each when it is first used."""

from lightning_struct.callbacks import AdapterCheckpoint as AdapterCheckpoint
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
from lightning_struct.nn import RecursiveLinear as RecursiveLinear
from lightning_struct.nn import StructuredLinear as StructuredLinear
from lightning_struct.nn import StructuredLSTM as StructuredLSTM
from lightning_struct.nn import ToeplitzLike as ToeplitzLike
from lightning_struct.nn import VandermondeLike as VandermondeLike
from lightning_struct.nn import add_adapters as add_adapters
from lightning_struct.nn import merge_adapters as merge_adapters
from lightning_struct.nn import replace_linear as replace_linear
from lightning_struct.optim import RLS as RLS
from lightning_struct.optim import SHF as SHF

__version__: str
