"""Laws over shards: where rows lie, who holds how much, how parts move."""
