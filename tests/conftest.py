"""One core, one thread: results don't depend on the machine, and neither do the seconds."""

import torch
import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
