"""Communication: what crosses between ranks, how often, how much, when, and who waited for it."""
