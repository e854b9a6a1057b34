"""ZeRO-1 and ZeRO-2: parameters are whole on every rank; optimizer state, and then gradients, are sharded."""
