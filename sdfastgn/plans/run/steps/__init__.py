"""The steps of a plan: this package's kernels, and ops of aten that keep tensors channels-last.

Any layout of an argument gives the right result, because kernels check layouts and copy where they must. A
step whose name ends with "_" writes over its first argument. Passes use it only where nobody else reads that
argument. Other steps write nothing that existed before. Steps call aten and never ``torch.nn.functional``,
because a trace has already run what other code may have put there.

Every public function of these files is a step. Rules write ``steps.linear``, whichever file has it.
"""

from sdfastgn.plans.run.steps.images import *  # noqa: F403
from sdfastgn.plans.run.steps.tokens import *  # noqa: F403
from sdfastgn.plans.run.steps.views import *  # noqa: F403
