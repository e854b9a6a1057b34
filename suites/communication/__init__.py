"""Communication: what crosses between ranks, how often, how much, when, and which results are waited for."""
