"""`python -m vllm_qualify` is the command `vllm-qualify`."""

from vllm_qualify.cli.commands import main

if __name__ == "__main__":
    main()
