"""Things to run with hf_cascade on real input; `python -m examples.demo` shows them all."""
