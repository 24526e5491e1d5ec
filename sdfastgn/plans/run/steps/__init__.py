"""The functions that nodes of a rewritten graph call, the *steps*. They call kernels and ops of aten.

Steps of images keep tensors channels-last. Arguments may have any memory layout: steps check it, and copy
where a kernel needs another one. A step whose name ends with "_" writes over its first argument. It is used
only where no other node reads that argument. Other steps write only into memory that they allocate.

Steps never call ``torch.nn.functional``. Other packages may replace functions there. A trace has then
recorded what the replacement does, and a step that called it would do so twice.

Every public function of these files is a step. Other code writes ``steps.linear``, whichever file has it.
"""

from sdfastgn.plans.run.steps.images import *  # noqa: F403
from sdfastgn.plans.run.steps.tokens import *  # noqa: F403
from sdfastgn.plans.run.steps.views import *  # noqa: F403
