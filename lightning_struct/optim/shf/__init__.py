"""SHF: stochastic Hessian-free optimization with LSMR.

`optimizer` has Algorithm 1, `settings` the options, `outputs` and `residuals` the lines of the algorithm for the two
kinds of losses, and `steps` their common part; `step_state` the state between steps, `samples` a batch over all
processes, `diagnostics` the warnings.
"""

from lightning_struct.optim.shf.optimizer import SHF
from lightning_struct.optim.shf.report import StepReport
from lightning_struct.optim.shf.settings import Settings

__all__ = ["SHF", "Settings", "StepReport"]
