"""`python -m hf_cascade` is `hf-cascade`."""

from .cli import main

if __name__ == "__main__":
    main()
