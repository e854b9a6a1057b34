"""Running cases: sessions, the pytest plugin, the cache of observations."""
