"""Laws over collectives: counts, bytes, order, overlap, waits, and how calls of ranks match."""
