"""The ledger: what crossed between ranks, in order, as values; and the laws over it."""
