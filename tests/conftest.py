"""One core, one thread: results don't depend on the machine, and neither do the seconds."""

import signal

import torch
import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
# Whoever runs the tests in the background may have made them ignore Ctrl-C, which is inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
