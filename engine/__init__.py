"""The engines under test: the contract an engine meets, the adapters of known engines, and the mutants."""
