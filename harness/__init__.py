"""How engines are judged: worlds, the training loop, the ledger, parity, verdicts, records and the CLI."""
